/**
 * The flow of one layer, left to right: where every box and arrow stands. Above, the residual stream runs from end to
 * end, one strand a token; below, attention and feed-forward read from it and add to it.
 */
import type { LayerKind } from "../protocol";

export type Tone = "input" | "stream" | "attention" | "feedForward";

export interface Box {
  /** The address inside the layer ("attn.pattern"), or of the whole model ("embed.out"). */
  point: string;
  label: string;
  tone: Tone;
  x: number;
  y: number;
  w: number;
  h: number;
  /** Heads (or experts) drawn one under the other; 1 for a plain matrix. */
  heads: Cell[];
  /** Named inside its own frame, where there is no room above. */
  inside?: boolean;
}

/** A head's own place in a box. */
export interface Cell {
  x: number;
  y: number;
  w: number;
  h: number;
}

export interface Arrow {
  tone: Tone;
  points: [number, number][];
  /** What happens on the way, and why, for whoever points at it. */
  label: string;
  /** A word that stands beside it. */
  word?: string;
}

export interface Plus {
  x: number;
  y: number;
  tone: Tone;
  /** "+" in a circle where there is none. */
  sign?: "+" | "=";
}

export interface Flow {
  width: number;
  height: number;
  laneTop: number;
  lane: number;
  tokensWidth: number;
  boxes: Box[];
  arrows: Arrow[];
  pluses: Plus[];
  /** From where to where the stream's strands run, and which of its widths holds there. */
  strands: { from: number; to: number; at: "before" | "between" | "after" }[];
  /** Where the stream passes through the layers that are not drawn. */
  skips: { x: number; side: "before" | "after" }[];
  logits: Cell;
  /** The field between the router and its experts, which tokens cross to those that were chosen for them. */
  routes: Cell | null;
}

const LABEL = 34; // above a box: its name and its shape
const NARROWEST = 870;
const ROUTES = 44; // between the router and the experts, beside the usual gap

/** Names of the boxes, as people say them. */
const NAMES: Record<string, string> = {
  "embed.tokens": "token rows",
  "embed.positions": "positions",
  "embed.out": "embedding",
  resid_pre: "stream in",
  resid_mid: "stream",
  resid_post: "stream out",
  "attn.norm": "norm",
  "attn.q_latent": "q latent",
  "attn.kv_latent": "kv latent",
  "attn.v": "V",
  "attn.dots": "Q·K",
  "attn.scores": "scores",
  "attn.masked": "masked",
  "attn.pattern": "pattern",
  "attn.z": "mix of V",
  "attn.out": "adds",
  "mlp.norm": "norm",
  "mlp.gate": "gate",
  "mlp.up": "up",
  "mlp.act": "neurons",
  "moe.scores": "router",
  "moe.gates": "gates",
  "moe.expert_out": "experts",
  "moe.shared_out": "shared by all",
  "mlp.out": "adds",
  "final.norm": "final norm",
};

const WHY: Record<Tone, string> = { input: "", stream: "", attention: "Attention", feedForward: "The feed-forward" };

export function nameOf(point: string): string {
  const turned = point.endsWith("_rot") ? " ↻" : "";
  if (/^attn\.q/.test(point) && !point.endsWith("latent")) return `Q${turned}`;
  if (/^attn\.k/.test(point) && !point.endsWith("latent")) return `K${turned}`;
  return NAMES[point] ?? point;
}

export function layoutFlow(kind: LayerKind, tokens: number, room: number, finalNorm = true, positions = false): Flow {
  const has = (name: string) => kind.points.some((point) => point.name === name);
  const { H, H_kv } = kind.sizes;
  const width = Math.max(room, NARROWEST);
  const lane = Math.min(22, Math.min(168, tokens * 14) / tokens + (tokens <= 4 ? 6 : 0));
  const tall = lane * tokens;
  const { E = 0 } = kind.sizes;
  const below = Math.max(tall, Math.min(236, Math.max(120, H * 18, E * 17)));
  const tokensWidth = 112;
  const laneTop = LABEL + 6;
  const top = laneTop + tall + 58 + LABEL;
  const bottom = top + below;
  const [q, k] = kind.dot_inputs;
  const square = Math.min(below, Math.max(tall, 84), Math.max(84, Math.min(150, width * 0.14)));

  const latents = ["attn.q_latent", "attn.kv_latent"].filter(has);
  const dense = has("mlp.act");
  const gated = has("mlp.gate");
  const normed = { attn: has("attn.norm"), mlp: has("mlp.norm") };
  const parts =
    (normed.attn ? 1 : 0) + latents.length * 0.8 + 1.75 + 0.62 + 1 + (normed.mlp ? 1 : 0) + (dense ? 2.8 : 2.6) + 1;
  const gaps = 7 + latents.length + (normed.attn ? 1 : 0) + (normed.mlp ? 1 : 0);
  const start = 10;
  const gap = Math.min(34, Math.max(18, width * 0.02));
  const part = Math.max(40, Math.min(120, (width - 2 * start - 2 * square - 12 - (dense ? 0 : ROUTES) - gaps * gap) / parts));

  const boxes: Box[] = [];
  const arrows: Arrow[] = [];
  const middle = (h: number) => top + (below - h) / 2;
  const add = (point: string, tone: Tone, x: number, y: number, w: number, h: number, heads?: Cell[]): Box => {
    const box = { point, label: nameOf(point), tone, x, y, w, h, heads: heads ?? [{ x, y, w, h }] };
    boxes.push(box);
    return box;
  };
  const straight = (from: Box, to: Box, tone: Tone, label: string) =>
    arrows.push({
      tone,
      points: [
        [from.x + from.w + 2, from.y + from.h / 2],
        [to.x - 3, to.y + to.h / 2],
      ],
      label,
    });

  // Below the stream, from left to right: attention.
  let cursor = start;
  let source: Box | null = null;
  if (normed.attn) {
    source = add("attn.norm", "attention", cursor, middle(tall), part, tall);
    cursor += part + gap;
  }
  for (const name of latents) {
    const latent = add(name, "attention", cursor, middle(tall), part * 0.8, tall);
    if (source) straight(source, latent, "attention", "squeezed into a narrow latent, which is all that the cache keeps");
    source ??= latent;
    cursor += part * 0.8 + gap;
  }
  const group = H / H_kv;
  const wq = part * 0.8;
  const wk = part * 0.42;
  const before3 = boxes.at(-1) ?? null;
  const boxQ = add(q, "attention", cursor, top, wq, below, spread(H, cursor, top, wq, below, group));
  add(k, "attention", cursor + wq + 6, top, wk, below, spread(H_kv, cursor + wq + 6, top, wk, below, 1, H_kv));
  const vx = cursor + wq + wk + 12;
  const boxV = add("attn.v", "attention", vx, top, wk, below, spread(H_kv, vx, top, wk, below, 1, H_kv));
  if (before3) straight(before3, boxQ, "attention", "three projections: what it looks for, what it offers, what it hands over");
  const attentionEntry = source ?? boxQ;
  cursor = boxV.x + boxV.w + gap;
  const scores = add("attn.scores", "attention", cursor, middle(square), square, square);
  straight(boxV, scores, "attention", "every query meets every key: their dot products, divided by √d");
  cursor += square + gap;
  const pattern = add("attn.pattern", "attention", cursor, middle(square), square, square);
  straight(scores, pattern, "attention", "the future is masked, then softmax makes weights that sum to one");
  cursor += square + gap;
  const z = add("attn.z", "attention", cursor, top, part * 0.62, below, spread(H, cursor, top, part * 0.62, below, group));
  straight(pattern, z, "attention", "each token takes the values of those it looks at, mixed by weight");
  cursor += z.w + gap;
  const attentionOut = add("attn.out", "attention", cursor, middle(tall), part, tall);
  straight(z, attentionOut, "attention", "all heads side by side, through W_O back to the stream's width");
  cursor += part + gap;

  // Feed-forward.
  let feedEntry: Box;
  let feedSource: Box | null = null;
  if (normed.mlp) {
    feedSource = add("mlp.norm", "feedForward", cursor, middle(tall), part, tall);
    cursor += part + gap;
  }
  let ready: Box;
  let routes: Cell | null = null;
  if (dense) {
    const w = part * 1.4;
    if (gated) {
      const h = Math.min(tall, (below - LABEL - 6) / 2);
      const gate = add("mlp.gate", "feedForward", cursor, top, w, h);
      const up = add("mlp.up", "feedForward", cursor, bottom - h, w, h);
      if (feedSource) {
        straight(feedSource, gate, "feedForward", "widened: room for many small questions at once");
        straight(feedSource, up, "feedForward", "widened: room for many small questions at once");
      }
      feedEntry = feedSource ?? gate;
      cursor += w + gap;
      ready = add("mlp.act", "feedForward", cursor, middle(tall), w, tall);
      straight(gate, ready, "feedForward", "the gate is bent, and lets through that much of up");
      straight(up, ready, "feedForward", "the gate is bent, and lets through that much of up");
    } else {
      const up = add("mlp.up", "feedForward", cursor, middle(tall), w, tall);
      if (feedSource) straight(feedSource, up, "feedForward", "widened: room for many small questions at once");
      feedEntry = feedSource ?? up;
      cursor += w + gap;
      ready = add("mlp.act", "feedForward", cursor, middle(tall), w, tall);
      straight(up, ready, "feedForward", "bent: only here can the layer do more than add and scale");
    }
    cursor += w + gap;
  } else {
    const router = add("moe.scores", "feedForward", cursor, middle(tall), part * 1.1, tall);
    if (feedSource) straight(feedSource, router, "feedForward", "the router asks which experts suit this token");
    feedEntry = feedSource ?? router;
    cursor += router.w + gap + ROUTES;
    const w = part * 1.5;
    const shared = has("moe.shared_out") ? 18 : 0;
    const room = below - (shared ? shared + 7 : 0);
    ready = add("moe.expert_out", "feedForward", cursor, top, w, room, spread(Math.max(1, E), cursor, top, w, room, 1));
    routes = { x: router.x + router.w, y: top, w: cursor - router.x - router.w, h: below };
    if (shared) add("moe.shared_out", "feedForward", cursor, bottom - shared, w, shared).inside = true;
    cursor += w + gap;
  }
  const feedOut = add("mlp.out", "feedForward", cursor, middle(tall), part, tall);
  straight(ready, feedOut, "feedForward", dense ? "back to the stream's width, neuron by neuron" : "summed, each times its gate");
  const end = Math.max(width, feedOut.x + feedOut.w + start);

  // The stream, above, from the tokens to the logits.
  const sw = Math.min(92, Math.max(50, part));
  const strands: Flow["strands"] = [];
  const skips: Flow["skips"] = [];
  // Where positions are rows that are added, the sum is drawn: a token's row, its position's row, and what they make.
  let from = tokensWidth + (positions ? 12 : 0);
  const signs: Plus[] = [];
  if (positions) {
    const narrow = Math.round(sw * 0.62);
    for (const [name, sign] of [["embed.tokens", "+"], ["embed.positions", "="]] as const) {
      add(name, "input", from, laneTop, narrow, tall);
      signs.push({ x: from + narrow + 15, y: laneTop + tall / 2, tone: "input", sign });
      from += narrow + 30;
    }
  }
  const embedding = add("embed.out", "stream", from, laneTop, sw, tall);
  const before = add("resid_pre", "stream", from + sw + 54, laneTop, sw, tall);
  skips.push({ x: embedding.x + embedding.w + 27, side: "before" });
  strands.push({ from: embedding.x + sw, to: before.x, at: "before" });
  const join = Math.max(before.x + sw + 26, attentionOut.x + attentionOut.w / 2);
  strands.push({ from: before.x + sw, to: join, at: "before" });
  const logitsWidth = 58;
  const finalX = end - 8 - logitsWidth - 20 - sw;
  const afterX = finalX - 54 - sw;
  let fork = before;
  let middleEnd = join;
  if (has("resid_mid")) {
    const between = add("resid_mid", "stream", join + 22, laneTop, sw, tall);
    strands.push({ from: join, to: between.x, at: "between" });
    fork = between;
    middleEnd = between.x + sw;
  }
  const joinTwo = Math.max(middleEnd + 20, Math.min(afterX - 22, feedOut.x + feedOut.w / 2));
  strands.push({ from: middleEnd, to: joinTwo, at: "between" });
  const after = add("resid_post", "stream", Math.max(afterX, joinTwo + 22), laneTop, sw, tall);
  strands.push({ from: joinTwo, to: after.x, at: "after" });
  skips.push({ x: after.x + sw + 27, side: "after" });
  const lastX = Math.max(finalX, after.x + sw + 54);
  if (finalNorm) add("final.norm", "stream", lastX, laneTop, sw, tall);
  strands.push({ from: after.x + sw, to: finalNorm ? lastX : lastX + sw, at: "after" });
  const lh = Math.max(26, Math.min(lane, 30));
  const logits = { x: lastX + sw + 20, y: laneTop + tall - lane / 2 - lh / 2, w: logitsWidth, h: lh };

  const lift = laneTop + tall + 3;
  const level = lift + 20; // the height at which an arrow turns between the storeys
  const down = (from: Box, to: Box, tone: Tone) => {
    const x = from.x + from.w / 2;
    const under = to.x + Math.min(to.w / 2, 30);
    arrows.push({ tone, points: [[x, lift], [x, level], [under, level], [under, to.y - LABEL]], label: `${WHY[tone]} reads a copy; the stream itself runs on untouched`, word: "reads" });
  };
  const up = (from: Box, x: number, tone: Tone) => {
    const over = from.x + from.w / 2;
    const bend = level + 12;
    arrows.push({ tone, points: [[over, from.y - LABEL], [over, bend], [x, bend], [x, lift]], label: `what ${WHY[tone].toLowerCase()} found is added to the stream, nothing is overwritten`, word: "adds" });
  };
  down(before, attentionEntry, "attention");
  up(attentionOut, join, "attention");
  down(fork, feedEntry, "feedForward");
  up(feedOut, joinTwo, "feedForward");
  const pluses: Plus[] = [
    ...signs,
    { x: join, y: laneTop + tall / 2, tone: "attention" },
    { x: joinTwo, y: laneTop + tall / 2, tone: "feedForward" },
  ];
  return {
    width: Math.max(end, logits.x + logits.w + 8),
    height: bottom + 16,
    laneTop,
    lane,
    tokensWidth,
    boxes,
    arrows,
    pluses,
    strands,
    skips,
    logits,
    routes,
  };
}

/** `n` heads one under the other, a little apart where another group begins. */
function spread(
  n: number,
  x: number,
  y: number,
  w: number,
  h: number,
  group: number,
  groups = n / group,
): Cell[] {
  const gap = Math.min(7, 60 / groups);
  const each = (h - gap * (groups - 1)) / groups;
  const thin = group > 1 ? Math.min(2, each / group / 4) : 0;
  const one = (each - thin * (group - 1)) / group;
  return Array.from({ length: n }, (_, i) => {
    const at = Math.floor(i / group);
    return { x, y: y + at * (each + gap) + (i % group) * (one + thin), w, h: one };
  });
}
