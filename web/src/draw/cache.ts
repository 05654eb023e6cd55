/** The key-value cache: a row a layer, a column a token, and the column that the next pass writes. */
import type { Palette } from "./scales";

export interface Cache {
  layers: number;
  tokens: number;
  /** How many of them were drawn, and so were added one by one. */
  grown: number;
  /** The token that is chosen. */
  token: number | null;
  /** Width of a column and height of all rows, in CSS pixels. */
  column: number;
  height: number;
}

export function paintCache(c: CanvasRenderingContext2D, cache: Cache, colours: Palette): void {
  const { layers, tokens, grown, token, column, height } = cache;
  const tall = height / layers;
  const gap = column > 3 ? 1 : 0;
  // Columns that touch are one rectangle, and the rows are parted afterwards: of a long text a rectangle for every
  // token of every layer would be sixty thousand of them.
  const stretch = (from: number, to: number, colour: string, least = 0) => {
    c.fillStyle = colour;
    if (gap === 0 && to > from) c.fillRect(from * column, 0, Math.max(least, (to - from) * column), height);
    else for (let t = from; t < to; t++) c.fillRect(t * column, 0, column - gap, height);
  };
  stretch(0, tokens - grown, colours.stream);
  stretch(tokens - grown, tokens, colours.attention);
  if (token !== null && token < tokens) stretch(token, token + 1, colours.selected, 1.5);
  if (tall >= 3) for (let l = 1; l <= layers; l++) c.clearRect(0, l * tall - 1, tokens * column + 1.5, 1);
  c.strokeStyle = colours.ink;
  c.lineWidth = 1;
  c.setLineDash([2, 2]);
  c.strokeRect(tokens * column + 0.5, 0.5, Math.max(3, column - gap) - 1, height - 0.5);
  c.setLineDash([]);
}
