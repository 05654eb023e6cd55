/** One dot product: two rows of factors one above the other, their products, and how the sum grows along them. */
import { number } from "../format";
import type { Kind } from "../protocol";
import { drawMatrix } from "./matrix";
import { codeOf, type Palette, tableOf, wantsDarkLetters } from "./scales";

export const STRIP = 17;
export const GAP = 3;
export const SUM = 46;
export const HEIGHT = 3 * (STRIP + GAP) + SUM;

/** 0, and the sum after each product. */
export function running(left: number[], right: number[]): number[] {
  const sums = [0];
  for (let i = 0; i < left.length; i++) sums.push(sums[i] + left[i] * right[i]);
  return sums;
}

/** The end of a row's scale: three deviations, or its largest value where that is nearer. */
export function scaleOf(values: number[]): number {
  let largest = 0;
  let square = 0;
  for (const value of values) {
    largest = Math.max(largest, Math.abs(value));
    square += value * value;
  }
  return Math.min(largest, 3 * Math.sqrt(square / Math.max(1, values.length))) || 1;
}

export function paintProduct(
  c: CanvasRenderingContext2D,
  left: number[],
  right: number[],
  width: number,
  kinds: [Kind, Kind],
  hovered: number | null,
  font: string,
  colours: Palette,
): void {
  const n = left.length;
  const products = left.map((value, i) => value * right[i]);
  const rows: [number[], Kind][] = [[left, kinds[0]], [right, kinds[1]], [products, "signed"]];
  const each = width / n;
  rows.forEach(([values, kind], row) => {
    const y = row * (STRIP + GAP);
    const scale = scaleOf(values);
    const codes = Uint8Array.from(values, (value) => codeOf(value, kind, scale));
    drawMatrix(c, { codes, rows: 1, columns: n, kind }, 0, y, width, STRIP, colours);
    if (each >= 44) {
      c.textAlign = "center";
      c.textBaseline = "middle";
      c.font = `450 11px ${font}`;
      values.forEach((value, i) => {
        c.fillStyle = wantsDarkLetters(tableOf(kind, colours)[codes[i]]) ? "#16181b" : "#ffffff";
        c.fillText(number(value, each < 54 ? 2 : 3), (i + 0.5) * each, y + STRIP / 2 + 0.5);
      });
    }
  });
  paintSum(c, running(left, right), width, font, colours);
  if (hovered !== null && hovered < n) {
    c.strokeStyle = colours.selected;
    c.lineWidth = 1.5;
    c.strokeRect(hovered * each, 0.75, Math.max(each, 2), HEIGHT - 1.5);
  }
}

/** The running sum as a line that starts at nothing and ends at the number itself. */
function paintSum(c: CanvasRenderingContext2D, sums: number[], width: number, font: string, colours: Palette): void {
  const top = 3 * (STRIP + GAP) + 4;
  const bottom = HEIGHT - 4;
  const low = Math.min(...sums);
  const high = Math.max(...sums);
  const span = high - low || 1;
  const y = (value: number) => bottom - ((value - low) / span) * (bottom - top);
  const x = (i: number) => (i / (sums.length - 1)) * (width - 4) + 1;
  c.strokeStyle = colours.faint;
  c.lineWidth = 1;
  c.beginPath();
  c.moveTo(0, y(0));
  c.lineTo(width, y(0));
  c.stroke();
  c.strokeStyle = colours.ink;
  c.lineWidth = 1.5;
  c.beginPath();
  sums.forEach((value, i) => {
    if (i === 0) c.moveTo(x(0), y(0));
    else if (sums.length <= 160) {
      c.lineTo(x(i), y(sums[i - 1]));
      c.lineTo(x(i), y(value));
    } else c.lineTo(x(i), y(value));
  });
  c.stroke();
  const end = sums[sums.length - 1];
  c.fillStyle = colours.selected;
  c.beginPath();
  c.arc(x(sums.length - 1), y(end), 2.6, 0, 7);
  c.fill();
  c.font = `400 11px ${font}`;
  c.fillStyle = colours.soft;
  c.textBaseline = y(0) - top > 14 ? "bottom" : "top";
  c.textAlign = "left";
  c.fillText("0", 2, y(0) + (y(0) - top > 14 ? -1 : 2));
}
