/** What edits leave on the flow: marks on what changed, the pattern as it was, strokes through what was cut. */
import type { Tensor } from "../api";
import type { Scar } from "../edits";
import type { Shown } from "../state/look";
import type { Box, Cell } from "./flow";
import { drawMatrix } from "./matrix";
import type { Palette } from "./scales";

const FONT = '"Inter Variable", system-ui, sans-serif';

/** Whether a box shows other numbers than it would without the edits; of experts, whether tokens go elsewhere. */
export function changed(box: Box, address: string, shown: Shown, ghost: Shown): boolean {
  const sources = box.point === "moe.expert_out" ? ["moe.chosen", "moe.gates"].map((name) => address.replace("moe.expert_out", name)) : [address];
  return sources.some((source) => {
    const tensor = shown.flow.get(source);
    return tensor !== undefined && differs(tensor, ghost.flow.get(source));
  });
}

function differs(one: Tensor, other: Tensor | undefined): boolean {
  const [mine, its] = [one.u8 ?? one.f32, other?.u8 ?? other?.f32];
  if (!mine || !its || mine.length !== its.length || (one.u8 && one.scale !== other?.scale)) return true;
  for (let i = 0; i < mine.length; i++) if (mine[i] !== its[i]) return true;
  return false;
}

/** The corner that says that a box holds other numbers than without the edits. */
export function paintChanged(c: CanvasRenderingContext2D, box: Box, colours: Palette): void {
  c.fillStyle = colours.edit;
  c.beginPath();
  c.moveTo(box.x + box.w + 2, box.y - 2);
  c.lineTo(box.x + box.w + 2, box.y + 8);
  c.lineTo(box.x + box.w - 8, box.y - 2);
  c.fill();
}

/** The pattern as it was before the edits, small, where the edited one has nothing to show: in its hidden half. */
export function paintGhost(c: CanvasRenderingContext2D, box: Box, before: Tensor, colours: Palette): void {
  if (!before.u8) return;
  const causal = before.u8.includes(0);
  const tokens = before.of[1];
  const free = causal ? Math.min(0.44, Math.floor(tokens / 2) / tokens) : 0.34; // what fits into the hidden half
  const side = Math.floor(box.w * free) - (free < 0.44 ? 5 : 0);
  if (side < 8) return;
  const x = box.x + box.w - side - 4;
  const y = box.y + 4;
  const [, rows, columns] = before.shape;
  c.fillStyle = colours.panel;
  c.fillRect(x - 1, y - 1, side + 2, side + 2);
  drawMatrix(c, { codes: before.u8, rows, columns, kind: before.kind }, x, y, side, side, colours);
  c.strokeStyle = colours.ink;
  c.lineWidth = 1;
  c.setLineDash([3, 2]);
  c.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  c.setLineDash([]);
  if (side < 34) return;
  c.font = `560 11px ${FONT}`;
  const width = c.measureText("before").width + 6;
  c.fillStyle = colours.panel;
  c.globalAlpha = 0.85;
  c.fillRect(x + side - width, y, width, 14);
  c.globalAlpha = 1;
  c.fillStyle = colours.ink;
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.fillText("before", x + side - width / 2, y + 7.5);
}

/** What an edit has cut, struck through in yellow and black: a box, its heads, or single edges of a pattern. */
export function paintScar(c: CanvasRenderingContext2D, box: Box, scar: Scar, tokens: number, head: number, colours: Palette): void {
  for (const cell of scarred(box, scar, tokens, head)) {
    const [over, thick] = cell.w < 24 || cell.h < 12 ? [1, 0.7] : [4, 1];
    for (const [colour, width] of [[colours.dark ? "#000" : "#1b1e23", 5], [colours.edit, 2.5]] as const) {
      c.strokeStyle = colour;
      c.lineWidth = width * thick;
      c.beginPath();
      c.moveTo(cell.x - over, cell.y + cell.h + over - 1);
      c.lineTo(cell.x + cell.w + over, cell.y - over + 1);
      c.stroke();
    }
  }
}

/** Where the strokes of a scar go. A pattern shows one head only: an edit of others leaves it alone. */
export function scarred(box: Box, scar: Scar, tokens: number, head: number): Cell[] {
  if (box.heads.length > 1) return scar.heads.length ? scar.heads.map((h) => box.heads[h]).filter(Boolean) : [box];
  const square = box.point === "attn.pattern" || box.point === "attn.scores";
  if (square && scar.heads.length && !scar.heads.includes(head)) return [];
  const each = box.w / tokens;
  if (square && scar.edges.length) {
    return scar.edges.map(([q, k]) => ({ x: box.x + k * each, y: box.y + (q * box.h) / tokens, w: each, h: box.h / tokens }));
  }
  if (square && scar.keys.length) return scar.keys.map((k) => ({ x: box.x + k * each, y: box.y, w: each, h: box.h }));
  return [box];
}
