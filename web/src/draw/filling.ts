/** Filling a matrix in, as it is computed: nothing, one number, its row, everything. */

export const STAGES = ["empty", "one number", "one row", "the whole"] as const;
export type Stage = (typeof STAGES)[number];

/** What has been filled so far: a first cell, its row up to `columns`, and all rows before `rows`. */
export interface Filled {
  cell: [number, number] | null;
  columns: number;
  rows: number;
}

/** Where the play-through begins: the cell that is pinned, else the last row, which has the most to tell. */
export function beginning(pinned: [number, number] | null, rows: number, causal: boolean): [number, number] {
  if (pinned && !(causal && pinned[1] > pinned[0])) return pinned;
  return [rows - 1, 0];
}

/** A stage in full. */
export function filledAt(stage: Stage, at: [number, number], rows: number, columns: number): Filled {
  if (stage === "empty") return { cell: null, columns: 0, rows: 0 };
  if (stage === "one number") return { cell: at, columns: 0, rows: 0 };
  return { cell: at, columns, rows: stage === "one row" ? 0 : rows };
}

export function isFilled(filled: Filled | null, row: number, column: number): boolean {
  if (filled === null || row < filled.rows) return true;
  const { cell } = filled;
  return cell !== null && row === cell[0] && (column === cell[1] || column < filled.columns);
}

/** Every state of a play-through with the time that it is looked at, in milliseconds: few enough for any size. */
export function* playThrough(at: [number, number], rows: number, columns: number): Generator<{ stage: Stage; filled: Filled; wait: number }> {
  yield { stage: "empty", filled: filledAt("empty", at, rows, columns), wait: 700 };
  yield { stage: "one number", filled: filledAt("one number", at, rows, columns), wait: 1500 };
  const steps = Math.min(columns, 24);
  for (let i = 1; i <= steps; i++) {
    const filled = { cell: at, columns: Math.round((i * columns) / steps), rows: 0 };
    yield { stage: "one row", filled, wait: i === steps ? 900 : 70 };
  }
  const later = Math.min(rows, 24);
  for (let i = 1; i <= later; i++) {
    const filled = { cell: at, columns, rows: Math.round((i * rows) / later) };
    yield { stage: "the whole", filled, wait: i === later ? 0 : 60 };
  }
}
