/** Painting a laid-out flow: strands, arrows, boxes with their numbers, labels. */
import { curveBumpX, line } from "d3-shape";
import type { Tensor } from "../api";
import { visible } from "../format";
import type { Scar } from "../edits";
import type { ModelCard } from "../protocol";
import { shapeOf } from "../state/points";
import type { Shown } from "../state/look";
import { loads, paintRoutes, paintSlot, routesOf } from "./experts";
import type { Box, Flow, Tone } from "./flow";
import { drawMatrix, hatch } from "./matrix";
import { changed, paintChanged, paintGhost, paintScar } from "./paintEdits";
import type { Palette } from "./scales";

const FONT = '"Inter Variable", system-ui, sans-serif';

export interface Marks {
  layer: number;
  head: number;
  token: number | null;
  pinned: string | null;
  hovered: string | null;
  /** The expert that is looked at, in a layer that has some. */
  expert: number | null;
  /** Points of this layer that edits touch, and what of them. */
  scars: Map<string, Scar[]>;
}

const MOST_STRANDS = 160;

export function addressOf(point: string, layer: number): string {
  return /^(embed\.|final\.|logits$|tokens$)/.test(point) ? point : `layers.${layer}.${point}`;
}

export function toneColour(tone: Tone, colours: Palette): string {
  return tone === "stream" || tone === "input" ? colours.stream : tone === "attention" ? colours.attention : colours.feedForward;
}

/** How thick a strand of this length of row is, of the room that it has; `largest` is finite, the length need not be. */
export function thickness(norm: number, largest: number, room: number): number {
  return Math.max(0.6, room * 0.86 * Math.min(1, Math.log1p(norm) / Math.log1p(largest)));
}

/** Norms by place: the stream before layer i, between its parts, after it; and what each part adds. */
export function normAt(norms: Float32Array, layers: number, tokens: number) {
  const row = (index: number) => norms.subarray(index * tokens, (index + 1) * tokens);
  return {
    before: (i: number) => row(i),
    after: (i: number) => row(i + 1),
    attention: (i: number) => row(layers + 1 + i),
    feedForward: (i: number) => row(2 * layers + 1 + i),
    between: (i: number) => row(3 * layers + 1 + i),
  };
}

export function paintFlow(
  context: CanvasRenderingContext2D,
  flow: Flow,
  shown: Shown,
  ghost: Shown | null,
  marks: Marks,
  colours: Palette,
): void {
  const tokens = shown.manifest.tokens.length;
  paintStrands(context, flow, shown, marks, colours);
  paintTokens(context, flow, shown, marks, colours);
  for (const arrow of flow.arrows) {
    paintArrow(context, arrow.points, toneColour(arrow.tone, colours));
    if (arrow.word) paintWord(context, arrow.points, arrow.word, colours);
  }
  paintHeadPath(context, flow, shown, marks, colours);
  for (const box of flow.boxes) {
    const address = addressOf(box.point, marks.layer);
    const tensor = shown.flow.get(address);
    const scars = marks.scars.get(box.point) ?? [];
    if (box.point === "moe.expert_out") paintExperts(context, flow, box, shown, marks, scars.flatMap((scar) => scar.heads), colours);
    else paintBox(context, box, tensor, tokens, marks, colours);
    paintName(context, box, address, tokens, marks, shown.card, colours);
    if (ghost && changed(box, address, shown, ghost)) {
      paintChanged(context, box, colours);
      const before = ghost.flow.get(address);
      if (box.point === "attn.pattern" && before) paintGhost(context, box, before, colours);
    }
    for (const scar of scars) paintScar(context, box, scar, tokens, marks.head, colours);
  }
  for (const plus of flow.pluses) {
    if (plus.sign) {
      context.fillStyle = colours.ink;
      context.font = `520 17px ${FONT}`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(plus.sign, plus.x, plus.y);
      continue;
    }
    context.fillStyle = colours.panel;
    context.strokeStyle = toneColour(plus.tone, colours);
    context.lineWidth = 2;
    context.beginPath();
    context.arc(plus.x, plus.y, 10, 0, 7);
    context.fill();
    context.stroke();
    context.beginPath();
    context.moveTo(plus.x - 5, plus.y);
    context.lineTo(plus.x + 5, plus.y);
    context.moveTo(plus.x, plus.y - 5);
    context.lineTo(plus.x, plus.y + 5);
    context.stroke();
  }
  paintSkips(context, flow, shown, marks, colours);
  paintLogits(context, flow, shown, marks, colours);
}

function paintStrands(c: CanvasRenderingContext2D, flow: Flow, shown: Shown, marks: Marks, colours: Palette): void {
  const tokens = shown.manifest.tokens.length;
  const at = normAt(shown.norms, shown.card.sizes.N, tokens);
  const layer = Math.min(marks.layer, shown.card.sizes.N - 1);
  // Of a long text several tokens share a strand: no more are drawn than can be told apart.
  const each = Math.max(1, Math.ceil(tokens / MOST_STRANDS));
  const lane = flow.lane * each;
  for (const strand of flow.strands) {
    const lengths = at[strand.at](layer);
    for (let t = 0; t < tokens; t += each) {
      const chosen = marks.token !== null && marks.token >= t && marks.token < t + each;
      let longest = 0;
      for (let i = t; i < Math.min(tokens, t + each); i++) if (lengths[i] > longest) longest = lengths[i];
      const thick = thickness(longest, shown.longest, lane);
      const y = flow.laneTop + t * flow.lane + lane / 2;
      c.fillStyle = chosen ? colours.selected : colours.stream;
      c.globalAlpha = chosen ? 1 : 0.55;
      c.fillRect(strand.from, y - thick / 2, strand.to - strand.from, thick);
    }
  }
  c.globalAlpha = 1;
}

function paintTokens(c: CanvasRenderingContext2D, flow: Flow, shown: Shown, marks: Marks, colours: Palette): void {
  const all = shown.manifest.tokens;
  const every = Math.max(1, Math.ceil(11.6 / flow.lane));
  c.textBaseline = "middle";
  for (let t = 0; t < all.length; t++) {
    const chosen = t === marks.token;
    if (!chosen && (t % every !== 0 || (marks.token !== null && Math.abs(t - marks.token) < every))) continue;
    const y = flow.laneTop + (t + 0.5) * flow.lane;
    c.textAlign = "right";
    c.font = `${chosen ? 650 : 480} 12px ${FONT}`;
    c.fillStyle = chosen ? colours.selected : colours.ink;
    c.fillText(clipped(c, visible(all[t].piece), flow.tokensWidth - 50), flow.tokensWidth - 10, y);
    c.textAlign = "left";
    c.font = `400 11px ${FONT}`;
    c.fillStyle = colours.soft;
    c.fillText(String(all[t].id), 2, y);
  }
  c.textAlign = "left";
  c.textBaseline = "alphabetic";
  c.font = `400 11px ${FONT}`;
  c.fillStyle = colours.soft;
  c.fillText("id", 2, flow.laneTop - 8);
  c.textAlign = "right";
  c.font = `600 12px ${FONT}`;
  c.fillStyle = colours.ink;
  c.fillText("tokens", flow.tokensWidth - 10, flow.laneTop - 8);
}

function clipped(c: CanvasRenderingContext2D, text: string, width: number): string {
  if (c.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && c.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}

/** A word beside an arrow between the storeys, on the side where nothing else is. */
function paintWord(c: CanvasRenderingContext2D, points: [number, number][], word: string, colours: Palette): void {
  const down = points[0][1] < points[points.length - 1][1];
  const [x, y] = down ? points[0] : points[points.length - 1];
  const right = down || points[0][0] > x + 4;
  c.font = `400 11px ${FONT}`;
  c.fillStyle = colours.soft;
  c.textAlign = right ? "left" : "right";
  c.textBaseline = "middle";
  c.fillText(word, x + (right ? 7 : -7), y + 9);
}

function paintArrow(c: CanvasRenderingContext2D, points: [number, number][], colour: string): void {
  c.strokeStyle = colour;
  c.fillStyle = colour;
  c.lineWidth = 1.75;
  c.beginPath();
  if (points.length === 2) {
    const [[x0, y0], [x1, y1]] = points;
    if (Math.abs(y0 - y1) < 1) {
      c.moveTo(x0, y0);
      c.lineTo(x1 - 4, y1);
    } else {
      line().curve(curveBumpX).context(c)([[x0, y0], [x1 - 4, y1]]);
    }
  } else {
    c.moveTo(...points[0]);
    for (let i = 1; i < points.length - 1; i++) c.arcTo(...points[i], ...points[i + 1], 9);
    c.lineTo(...points[points.length - 1]);
  }
  c.stroke();
  const [px, py] = points[points.length - 2];
  const [x, y] = points[points.length - 1];
  const sideways = points.length === 2;
  const way = sideways ? Math.sign(x - px) : Math.sign(y - py);
  c.beginPath();
  c.moveTo(x, y);
  if (sideways) {
    c.lineTo(x - 7 * way, y - 4);
    c.lineTo(x - 7 * way, y + 4);
  } else {
    c.lineTo(x - 4, y - 7 * way);
    c.lineTo(x + 4, y - 7 * way);
  }
  c.fill();
}

/** The way of the chosen head: its query and its key into the scores, its values into its mix. */
function paintHeadPath(c: CanvasRenderingContext2D, flow: Flow, shown: Shown, marks: Marks, colours: Palette): void {
  const box = (test: (point: string) => boolean) => flow.boxes.find((one) => test(one.point));
  const q = box((p) => p.startsWith("attn.q") && !p.endsWith("latent"));
  const k = box((p) => p.startsWith("attn.k") && !p.endsWith("latent"));
  const v = box((p) => p === "attn.v");
  const z = box((p) => p === "attn.z");
  if (!q || !k || !v || !z) return;
  const group = Math.floor((marks.head * k.heads.length) / q.heads.length);
  c.strokeStyle = colours.selected;
  c.lineWidth = 2;
  for (const cell of [q.heads[marks.head], k.heads[group], v.heads[group], z.heads[marks.head]]) {
    if (!cell) continue;
    c.strokeRect(cell.x - 2, cell.y - 2, cell.w + 4, cell.h + 4);
  }
  void shown;
}

function paintBox(
  c: CanvasRenderingContext2D,
  box: Box,
  tensor: Tensor | undefined,
  tokens: number,
  marks: Marks,
  colours: Palette,
): void {
  if (tensor?.u8) {
    const [heads, rows, columns] = tensor.shape;
    const size = rows * columns;
    for (let h = 0; h < Math.min(heads, box.heads.length); h++) {
      const cell = box.heads[h];
      const codes = tensor.u8.subarray(h * size, (h + 1) * size);
      drawMatrix(c, { codes, rows, columns, kind: tensor.kind }, cell.x, cell.y, cell.w, cell.h, colours);
    }
  } else {
    hatch(c, box.x, box.y, box.w, box.h, colours);
  }
  c.lineWidth = 1;
  c.strokeStyle = colours.line;
  for (const cell of box.heads) c.strokeRect(cell.x - 0.5, cell.y - 0.5, cell.w + 1, cell.h + 1);
  if (marks.token !== null && box.heads.length === 1 && tensor) {
    const each = box.h / tokens;
    c.strokeStyle = colours.selected;
    c.lineWidth = 1.5;
    c.strokeRect(box.x - 1.5, box.y + marks.token * each, box.w + 3, Math.max(each, 2));
  }
}

/** The experts of a layer, one slot each, and the ways of the tokens to them. */
function paintExperts(
  c: CanvasRenderingContext2D,
  flow: Flow,
  box: Box,
  shown: Shown,
  marks: Marks,
  off: number[],
  colours: Palette,
): void {
  const tokens = shown.manifest.tokens.length;
  const of = (name: string) => shown.flow.get(`layers.${marks.layer}.${name}`);
  const routes = routesOf(of("moe.chosen"), of("moe.gates"));
  const chosen = { token: marks.token, expert: marks.expert };
  const rows = flow.boxes.find((one) => one.point === "moe.scores");
  if (rows) paintRoutes(c, flow, rows, box.heads, routes, tokens, chosen, colours);
  const each = loads(routes, box.heads.length, tokens);
  const largest = Math.max(1e-6, ...routes.map((route) => Math.abs(route.gate)));
  box.heads.forEach((slot, e) => paintSlot(c, slot, e, each[e], largest, chosen, off.includes(e), FONT, colours));
}

/** A box's name and shape above it, and the frame of one that is pinned or pointed at. */
function paintName(
  c: CanvasRenderingContext2D,
  box: Box,
  address: string,
  tokens: number,
  marks: Marks,
  card: ModelCard,
  colours: Palette,
): void {
  const pinned = marks.pinned === address;
  const hovered = marks.hovered === address;
  if (pinned || hovered) {
    c.strokeStyle = pinned ? colours.selected : colours.ink;
    c.lineWidth = 2;
    c.strokeRect(box.x - 4, box.y - 4, box.w + 8, box.h + 8);
  }
  const centre = box.x + box.w / 2;
  c.textAlign = "center";
  if (box.inside) {
    c.textBaseline = "middle";
    c.font = `520 11px ${FONT}`;
    const width = c.measureText(box.label).width + 10;
    c.fillStyle = colours.panel;
    c.globalAlpha = 0.88;
    c.fillRect(centre - width / 2, box.y + 2, width, box.h - 4);
    c.globalAlpha = 1;
    c.fillStyle = pinned ? colours.selected : colours.ink;
    c.fillText(box.label, centre, box.y + box.h / 2 + 0.5);
    return;
  }
  c.textBaseline = "alphabetic";
  c.font = `600 12px ${FONT}`;
  c.fillStyle = pinned ? colours.selected : colours.ink;
  c.fillText(box.label, centre, box.y - 20);
  c.font = `400 11px ${FONT}`;
  c.fillStyle = colours.soft;
  c.fillText(shapeText(card, address, tokens, box), centre, box.y - 7);
}

/** A box's shape in numbers; of narrow boxes of heads only how many heads there are. */
function shapeText(card: ModelCard, address: string, tokens: number, box: Box): string {
  const shape = shapeOf(card, address, tokens);
  if (box.point === "moe.expert_out") return `${shape[1]} of ${box.heads.length} a token`;
  if (shape.length === 3) {
    if (["attn.scores", "attn.pattern"].includes(box.point)) return `${shape[1]}×${shape[2]}`;
    return box.w < 46 ? `${shape[0]}` : `${shape[0]} heads`;
  }
  return shape.join("×");
}

function paintSkips(c: CanvasRenderingContext2D, flow: Flow, shown: Shown, marks: Marks, colours: Palette): void {
  const layers = shown.card.sizes.N;
  for (const skip of flow.skips) {
    const passed = skip.side === "before" ? marks.layer : layers - 1 - marks.layer;
    if (passed === 0) continue;
    const height = flow.lane * shown.manifest.tokens.length;
    const y = flow.laneTop + height / 2;
    c.fillStyle = colours.panel;
    c.strokeStyle = colours.faint;
    c.lineWidth = 1;
    c.beginPath();
    c.roundRect(skip.x - 21, y - 19, 42, 38, 8);
    c.fill();
    c.stroke();
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillStyle = colours.ink;
    c.font = `620 13px ${FONT}`;
    c.fillText(String(passed), skip.x, y - 6);
    c.font = `400 11px ${FONT}`;
    c.fillStyle = colours.soft;
    c.fillText(passed === 1 ? "layer" : "layers", skip.x, y + 8);
  }
}

function paintLogits(c: CanvasRenderingContext2D, flow: Flow, shown: Shown, marks: Marks, colours: Palette): void {
  if (!shown.card.points.some((point) => point.name === "logits")) return;
  const { x, y, w, h } = flow.logits;
  const chosen = marks.pinned === "logits" || marks.hovered === "logits";
  paintArrow(c, [[x - 18, y + h / 2], [x - 2, y + h / 2]], colours.stream);
  c.fillStyle = colours.panel;
  c.strokeStyle = chosen ? colours.selected : colours.soft;
  c.lineWidth = chosen ? 2 : 1;
  c.beginPath();
  c.roundRect(x, y, w, h, 6);
  c.fill();
  c.stroke();
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.fillStyle = colours.ink;
  c.font = `600 12px ${FONT}`;
  c.fillText("logits", x + w / 2, y + h / 2);
}
