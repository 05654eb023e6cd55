/** Matrices on a canvas: one colour a cell, hidden cells hatched, never blank. */
import type { Kind } from "../protocol";
import { type Palette, tableOf } from "./scales";

export interface Codes {
  codes: Uint8Array;
  rows: number;
  columns: number;
  kind: Kind;
}

let scratch: HTMLCanvasElement | null = null;

/** The pixels of a matrix, one a cell, in packed colours; hidden cells stay transparent. */
export function pixels(matrix: Codes, colours: Palette): Uint32Array {
  const table = tableOf(matrix.kind, colours);
  const out = new Uint32Array(matrix.rows * matrix.columns);
  for (let i = 0; i < out.length; i++) out[i] = table[matrix.codes[i]];
  return out;
}

/** Draw a matrix into the rectangle x, y, w, h, its cells as sharp squares. */
export function drawMatrix(
  context: CanvasRenderingContext2D,
  matrix: Codes,
  x: number,
  y: number,
  w: number,
  h: number,
  colours: Palette,
): void {
  if (matrix.rows === 0 || matrix.columns === 0) return;
  if (matrix.codes.includes(0)) hatch(context, x, y, w, h, colours);
  scratch ??= document.createElement("canvas");
  scratch.width = matrix.columns;
  scratch.height = matrix.rows;
  const inner = scratch.getContext("2d")!;
  const image = new ImageData(matrix.columns, matrix.rows);
  new Uint32Array(image.data.buffer).set(pixels(matrix, colours));
  inner.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = matrix.columns > w * devicePixelRatio || matrix.rows > h * devicePixelRatio;
  context.imageSmoothingQuality = "high";
  context.drawImage(scratch, x, y, w, h);
}

const hatches = new Map<string, CanvasPattern>();

/** Diagonal lines over a rectangle: what may not be seen. */
export function hatch(
  context: CanvasRenderingContext2D,
  x: number,
  y: number,
  w: number,
  h: number,
  colours: Palette,
): void {
  const key = colours.faint;
  let pattern = hatches.get(key);
  if (!pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 12;
    const inner = tile.getContext("2d")!;
    inner.strokeStyle = colours.faint;
    inner.lineWidth = 1.6;
    inner.beginPath();
    for (const at of [-12, 0, 12]) {
      inner.moveTo(at - 2, 14);
      inner.lineTo(at + 14, -2);
    }
    inner.stroke();
    pattern = context.createPattern(tile, "repeat")!;
    pattern.setTransform(new DOMMatrix().scale(0.5));
    hatches.set(key, pattern);
  }
  context.fillStyle = pattern;
  context.fillRect(x, y, w, h);
}

/** A canvas's context, its size set for the screen's density and cleared; drawing is in CSS pixels. */
export function prepared(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const density = Math.min(window.devicePixelRatio || 1, 3);
  const w = Math.max(1, Math.round(width * density));
  const h = Math.max(1, Math.round(height * density));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
