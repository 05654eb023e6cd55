/** Every head of every layer in one image: the patterns side by side, each cell of the picture one weight. */
import type { AtlasHeader, HeadScores } from "../protocol";
import type { Palette } from "./scales";

export interface Atlas {
  run: string;
  layers: number;
  heads: number;
  side: number;
  triangle: boolean;
  codes: Uint8Array[]; // one a head, layer by layer; a layer that has not come yet is missing
  scores: (HeadScores | undefined)[];
}

export const SORTS = ["layer", "previous", "first", "itself", "induction", "entropy"] as const;
export type Sort = (typeof SORTS)[number];

export function emptyAtlas(run: string, layers: number, heads: number): Atlas {
  return { run, layers, heads, side: 1, triangle: true, codes: [], scores: [] };
}

/** Put the layers of an answer into their places. */
export function receive(atlas: Atlas, header: AtlasHeader, bytes: Uint8Array): void {
  const each = header.triangle ? (header.side * (header.side + 1)) / 2 : header.side * header.side;
  atlas.side = header.side;
  atlas.triangle = header.triangle;
  for (let i = 0; i < header.scores.length; i++) {
    const at = header.first * atlas.heads + i;
    atlas.codes[at] = bytes.subarray(i * each, (i + 1) * each);
    atlas.scores[at] = header.scores[i];
  }
}

/** Heads in the order asked for: by layer, or by a score, highest first (entropy: lowest, the most decided). */
export function ordered(atlas: Atlas, sort: Sort): number[] {
  const all = Array.from({ length: atlas.layers * atlas.heads }, (_, i) => i);
  if (sort === "layer") return all;
  const score = (i: number) => {
    const found = atlas.scores[i]?.[sort];
    if (found === null || found === undefined) return -Infinity;
    return sort === "entropy" ? -found : found;
  };
  return all.sort((a, b) => score(b) - score(a) || a - b);
}

export interface Grid {
  columns: number;
  rows: number;
  cell: number;
  gap: number;
}

/** How the heads are laid out in a width: layers as columns where they are sorted by layer, else row by row. */
export function gridOf(atlas: Atlas, width: number, sort: Sort): Grid {
  const count = atlas.layers * atlas.heads;
  let columns = sort === "layer" ? atlas.layers : Math.min(count, Math.max(atlas.layers, 12));
  const gap = 3;
  let cell = Math.min(64, Math.floor((width - gap) / columns) - gap);
  if (cell < 15) {
    columns = Math.max(1, Math.floor((width - gap) / (15 + gap)));
    if (sort === "layer" && atlas.heads > columns) columns = atlas.heads;
    cell = Math.max(8, Math.floor((width - gap) / columns) - gap);
  }
  const rows = sort === "layer" && columns === atlas.layers ? atlas.heads : Math.ceil(count / columns);
  return { columns, rows, cell, gap };
}

/** Where the head that stands at place `place` of the order is drawn: column and row of the grid. */
export function placeOf(place: number, atlas: Atlas, grid: Grid, sort: Sort): [number, number] {
  if (sort === "layer" && grid.columns === atlas.layers) {
    return [Math.floor(place / atlas.heads), place % atlas.heads];
  }
  return [place % grid.columns, Math.floor(place / grid.columns)];
}

/** The place in the order that is drawn at a column and row; −1 where there is none. */
export function placeAt(column: number, row: number, atlas: Atlas, grid: Grid, sort: Sort): number {
  if (column < 0 || column >= grid.columns || row < 0 || row >= grid.rows) return -1;
  const place =
    sort === "layer" && grid.columns === atlas.layers ? column * atlas.heads + row : row * grid.columns + column;
  return place < atlas.layers * atlas.heads ? place : -1;
}

/**
 * The whole atlas as one picture of `density` device pixels to a CSS pixel: every head's cells are sampled straight
 * into it, so that drawing costs one pass over the pixels whatever the number of heads.
 */
export function paint(
  out: Uint32Array,
  width: number,
  atlas: Atlas,
  order: number[],
  grid: Grid,
  sort: Sort,
  density: number,
  colours: Palette,
): void {
  const cell = Math.round(grid.cell * density);
  const step = (grid.cell + grid.gap) * density;
  const height = out.length / width;
  const side = atlas.side;
  const source = new Int32Array(cell);
  for (let p = 0; p < cell; p++) source[p] = Math.min(side - 1, Math.floor((p * side) / cell));
  const table = colours.weights;
  const ground = colours.dark ? 0xff26221f : 0xfff1f0ec;
  for (let place = 0; place < order.length; place++) {
    const codes = atlas.codes[order[place]];
    const [column, row] = placeOf(place, atlas, grid, sort);
    const left = Math.round(grid.gap * density + column * step);
    const top = Math.round(grid.gap * density + row * step);
    if (left + cell > width || top + cell > height) continue;
    for (let y = 0; y < cell; y++) {
      const r = source[y];
      const start = atlas.triangle ? (r * (r + 1)) / 2 : r * side;
      const line = (top + y) * width + left;
      for (let x = 0; x < cell; x++) {
        const c = source[x];
        out[line + x] = codes === undefined || (atlas.triangle && c > r) ? ground : table[codes[start + c]];
      }
    }
  }
}
