/** A window of a tensor: cells in colours, written out where they have room, with rows and columns named. */
import type { Tensor } from "../api";
import { number, shortened, visible } from "../format";
import type { Token } from "../protocol";
import { type Filled, isFilled } from "./filling";
import { drawMatrix } from "./matrix";
import { codeOf, type Palette, tableOf, wantsDarkLetters } from "./scales";

export const LABELS = 104; // left of the cells: names of rows
export const TOP = 22; // above the cells: names of columns
const NUMBERS_FROM = 44; // pixels of a cell's width from which on its number is written

/** Which part of the whole is seen, and how large its cells are. */
export interface Frame {
  left: number;
  top: number;
  width: number;
  height: number;
  cellWidth: number;
  cellHeight: number;
  rows: number;
  columns: number;
}

export type Outline = [cell: [number, number] | null, colour: string, thickness: number];

const xOf = (frame: Frame, column: number) => LABELS + column * frame.cellWidth - frame.left;
const yOf = (frame: Frame, row: number) => TOP + row * frame.cellHeight - frame.top;

/** The cells that have come; of a matrix that is being filled in only those that have been filled. */
export function paintNumbers(
  c: CanvasRenderingContext2D,
  frame: Frame,
  part: Tensor | null,
  filled: Filled | null,
  colours: Palette,
  outlines: Outline[],
): void {
  c.save();
  c.beginPath();
  c.rect(LABELS, TOP, frame.width - LABELS, frame.height - TOP);
  c.clip();
  if (part?.f32) paintCells(c, frame, part, filled, colours);
  for (const outline of outlines) paintOutline(c, frame, outline);
  c.restore();
}

const coded = new WeakMap<Tensor, Uint8Array>();

/** The codes of a part that came as numbers, worked out once. */
function codesOf(part: Tensor): Uint8Array {
  let codes = coded.get(part);
  if (!codes) {
    const values = part.f32!;
    codes = new Uint8Array(values.length);
    for (let i = 0; i < codes.length; i++) codes[i] = codeOf(values[i], part.kind, part.scale); // `from` would go by way of an iterator
    coded.set(part, codes);
  }
  return codes;
}

function paintCells(c: CanvasRenderingContext2D, frame: Frame, part: Tensor, filled: Filled | null, colours: Palette): void {
  const [, r, k] = part.shape;
  const [, ofRows, ofColumns] = part.of;
  const [, startRow, startColumn] = part.start;
  const { cellWidth, cellHeight } = frame;
  const values = part.f32!;
  const codes = codesOf(part);
  const x = xOf(frame, startColumn);
  const y = yOf(frame, startRow);
  const w = ofColumns * cellWidth;
  const h = ofRows * cellHeight;
  c.save();
  if (filled !== null) clipTo(c, frame, filled, colours);
  drawMatrix(c, { codes, rows: r, columns: k, kind: part.kind }, x, y, w, h, colours);
  c.restore();
  if (r !== ofRows || k !== ofColumns) return; // pooled: a cell drawn is many
  if (cellWidth >= 7) paintLines(c, x, y, r, k, cellWidth, cellHeight, colours);
  const table = tableOf(part.kind, colours);
  const written = cellWidth >= NUMBERS_FROM && cellHeight >= 16;
  c.textAlign = "center";
  c.textBaseline = "middle";
  for (let i = 0; i < r; i++) {
    for (let j = 0; j < k; j++) {
      if (!isFilled(filled, startRow + i, startColumn + j)) continue;
      const code = codes[i * k + j];
      const value = values[i * k + j];
      const cx = x + (j + 0.5) * cellWidth;
      const cy = y + (i + 0.5) * cellHeight;
      if (written && code !== 0) {
        c.fillStyle = wantsDarkLetters(table[code]) ? "#16181b" : "#ffffff";
        c.font = `450 ${cellWidth < 54 ? 11 : 12}px "Inter Variable", sans-serif`;
        c.fillText(part.kind === "ids" ? String(value) : number(value, cellWidth < 54 ? 2 : 3), cx, cy);
      } else if (code === 0) {
        paintOdd(c, value, cx, cy, cellWidth, cellHeight, colours);
      } else if (cellWidth >= 5 && part.kind === "signed" && Math.abs(value) > part.scale) {
        // An outlier past the scale's end: marked, since its colour says less than its size.
        c.fillStyle = colours.panel;
        c.beginPath();
        c.arc(cx, cy, Math.min(1.6, cellWidth / 5), 0, 7);
        c.fill();
      }
    }
  }
}

/** Leaves only what has been filled: what has not been computed yet is absent, not zero, inside a dashed frame. */
function clipTo(c: CanvasRenderingContext2D, frame: Frame, filled: Filled, colours: Palette): void {
  const { cellWidth, cellHeight, rows, columns } = frame;
  c.strokeStyle = colours.faint;
  c.lineWidth = 1;
  c.setLineDash([4, 3]);
  c.strokeRect(xOf(frame, 0) + 0.5, yOf(frame, 0) + 0.5, columns * cellWidth - 1, rows * cellHeight - 1);
  c.setLineDash([]);
  c.beginPath();
  if (filled.rows > 0) c.rect(xOf(frame, 0), yOf(frame, 0), columns * cellWidth, filled.rows * cellHeight);
  if (filled.cell !== null) {
    const y = yOf(frame, filled.cell[0]);
    c.rect(xOf(frame, filled.cell[1]), y, Math.max(cellWidth, 2), cellHeight);
    c.rect(xOf(frame, 0), y, filled.columns * cellWidth, cellHeight);
  }
  c.clip();
}

/** What is no number: × for none at all, the sign of an infinity; what is merely hidden keeps its hatching. */
function paintOdd(c: CanvasRenderingContext2D, value: number, x: number, y: number, w: number, h: number, colours: Palette): void {
  if (Number.isNaN(value) || Math.min(w, h) < 7) return;
  c.fillStyle = colours.panel;
  c.fillRect(x - Math.min(w, 22) / 2 + 1, y - Math.min(h, 14) / 2 + 1, Math.min(w, 22) - 2, Math.min(h, 14) - 2);
  c.fillStyle = colours.ink;
  c.font = `560 ${w < 14 ? 9 : 11}px "Inter Variable", sans-serif`;
  c.fillText(number(value), x, y + 0.5);
}

/** What the rows and the columns of a tensor count. */
export function axesOf(symbols: string[]): [string, string] {
  const names: Record<string, string> = {
    T: "token", S: "key", d: "width", d_ff: "neuron", E: "expert", V: "id", k: "choice", "1": "",
    q_rank: "latent", kv_rank: "latent", d_rope: "rotary", d_value: "value", d_head: "d_head",
  };
  const shown = symbols.length === 3 && symbols[0] === "T" ? [symbols[0], symbols[2]] : symbols.slice(-2);
  const [rows, columns] = shown.length === 1 ? [shown[0], "1"] : shown;
  return [names[rows] ?? rows, names[columns] ?? columns];
}

function paintLines(
  c: CanvasRenderingContext2D,
  x: number,
  y: number,
  rows: number,
  columns: number,
  cellWidth: number,
  cellHeight: number,
  colours: Palette,
): void {
  c.strokeStyle = colours.panel;
  c.lineWidth = cellWidth > 20 ? 1 : 0.5;
  c.beginPath();
  for (let i = 0; i <= columns; i++) {
    c.moveTo(x + i * cellWidth, y);
    c.lineTo(x + i * cellWidth, y + rows * cellHeight);
  }
  for (let i = 0; i <= rows; i++) {
    c.moveTo(x, y + i * cellHeight);
    c.lineTo(x + columns * cellWidth, y + i * cellHeight);
  }
  c.stroke();
}

function paintOutline(c: CanvasRenderingContext2D, frame: Frame, [cell, colour, thickness]: Outline): void {
  if (!cell) return;
  const w = Math.max(frame.cellWidth, 3);
  const h = Math.max(frame.cellHeight, 3);
  const x = xOf(frame, cell[1]);
  const y = yOf(frame, cell[0]);
  c.strokeStyle = colour;
  c.lineWidth = thickness;
  c.strokeRect(x, y, w, h);
  c.globalAlpha = 0.35;
  c.lineWidth = 1;
  c.strokeRect(LABELS, y, Math.min(frame.width - LABELS, frame.columns * frame.cellWidth), h);
  c.strokeRect(x, TOP, w, Math.min(frame.height - TOP, frame.rows * frame.cellHeight));
  c.globalAlpha = 1;
}

/** Tokens beside the rows; above the columns tokens too where they are keys, else numbers, as many as have room. */
export function paintLabels(
  c: CanvasRenderingContext2D,
  frame: Frame,
  tokens: Token[],
  square: boolean,
  marked: [number, number] | null,
  token: number | null,
  axes: [string, string],
  colours: Palette,
): void {
  c.textBaseline = "middle";
  c.textAlign = "right";
  c.font = `400 11px "Inter Variable", sans-serif`;
  c.fillStyle = colours.soft;
  const both = axes[1] ? `${axes[0]} ↓  ${axes[1]} →` : `${axes[0]} ↓`;
  c.fillText(both, LABELS - 8, TOP / 2, LABELS - 10); // a long name is set narrower, not cut
  const { cellWidth, cellHeight } = frame;
  c.textBaseline = "middle";
  c.textAlign = "right";
  const every = Math.max(1, Math.ceil(13 / cellHeight));
  const firstRow = Math.floor(frame.top / cellHeight);
  const lastRow = Math.min(frame.rows, Math.ceil((frame.top + frame.height - TOP) / cellHeight) + 1);
  for (let r = firstRow; r < lastRow; r++) {
    const y = yOf(frame, r) + cellHeight / 2;
    if (y < TOP + 4 || y > frame.height - 2) continue;
    const chosen = marked?.[0] === r || token === r;
    if (!chosen && (r % every !== 0 || (marked && Math.abs(marked[0] - r) < every))) continue;
    c.fillStyle = chosen ? colours.selected : colours.soft;
    c.font = `${chosen ? 620 : 400} 12px "Inter Variable", sans-serif`;
    const name = tokens[r] ? visible(tokens[r].piece) : String(r);
    c.fillText(shortened(name, 13), LABELS - 8, y);
  }
  c.textAlign = "center";
  const apart = stepOf(Math.ceil((square ? 15 : 36) / cellWidth));
  const firstColumn = Math.floor(frame.left / cellWidth);
  const lastColumn = Math.min(frame.columns, Math.ceil((frame.left + frame.width - LABELS) / cellWidth) + 1);
  for (let k = firstColumn; k < lastColumn; k++) {
    const x = xOf(frame, k) + cellWidth / 2;
    if (x < LABELS || x > frame.width - 4) continue;
    const chosen = marked?.[1] === k;
    if (!chosen && (k % apart !== 0 || (marked && Math.abs(marked[1] - k) * cellWidth < 30))) continue;
    c.fillStyle = chosen ? colours.selected : colours.soft;
    c.font = `${chosen ? 620 : 400} 11px "Inter Variable", sans-serif`;
    const named = square && tokens[k] && cellWidth >= 34;
    c.fillText(named ? visible(tokens[k].piece).slice(0, 6) : String(k), x, TOP / 2);
  }
}

/** What the edits changed: one part of a tensor minus the same part of another run's, on a scale of its own. */
export function difference(one: Tensor, other: Tensor): Tensor {
  const values = one.f32!.map((value, i) => value - other.f32![i]);
  let largest = 0;
  for (const value of values) if (Math.abs(value) > largest) largest = Math.abs(value);
  return { ...one, f32: values, kind: "signed", scale: largest || 1, largest, beyond: 0 };
}

/** The smallest round number that is at least `step`. */
export function stepOf(step: number): number {
  for (let power = 1; ; power *= 10) {
    for (const round of [1, 2, 5]) if (round * power >= step) return round * power;
  }
}
