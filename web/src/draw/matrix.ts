/** Matrices on a canvas: one colour a cell, hidden cells hatched, never blank. */
import type { Kind } from "../protocol";
import { type Palette, tableOf } from "./scales";

export interface Codes {
  codes: Uint8Array;
  rows: number;
  columns: number;
  kind: Kind;
}

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
  const drawn = picture(matrix, colours);
  if (drawn.hides) hatch(context, x, y, w, h, colours);
  context.imageSmoothingEnabled = matrix.columns > w * devicePixelRatio || matrix.rows > h * devicePixelRatio;
  context.imageSmoothingQuality = "high";
  context.drawImage(drawn.canvas, x, y, w, h);
}

interface Picture {
  canvas: HTMLCanvasElement;
  hides: boolean;
}

// By the bytes that came from the server: they never change, and go when no pass shows them any more.
const pictures = new WeakMap<ArrayBufferLike, Map<string, Picture>>();

/** A matrix as an image, made once: what is pointed at changes far more often than the numbers. */
function picture(matrix: Codes, colours: Palette): Picture {
  const { codes, rows, columns, kind } = matrix;
  const key = `${codes.byteOffset}:${rows}:${columns}:${kind}:${colours.dark}`;
  let ofBytes = pictures.get(codes.buffer);
  if (!ofBytes) pictures.set(codes.buffer, (ofBytes = new Map()));
  let found = ofBytes.get(key);
  if (!found) {
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    const image = new ImageData(columns, rows);
    new Uint32Array(image.data.buffer).set(pixels(matrix, colours));
    canvas.getContext("2d")!.putImageData(image, 0, 0);
    found = { canvas, hides: codes.includes(0) };
    ofBytes.set(key, found);
  }
  return found;
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
