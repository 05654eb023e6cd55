import { describe, expect, it } from "vitest";
import type { Tensor } from "../src/api";
import { beginning, filledAt, isFilled, playThrough, STAGES } from "../src/draw/filling";
import type { Box } from "../src/draw/flow";
import { axesOf, difference } from "../src/draw/numbers";
import { scarred } from "../src/draw/paintEdits";
import { running, scaleOf } from "../src/draw/product";

describe("a dot product", () => {
  it("grows from nothing to the sum of its products", () => {
    expect(running([1, 2, -3], [4, 0.5, 2])).toEqual([0, 4, 5, -1]);
    expect(running([], [])).toEqual([0]);
  });

  it("is drawn on a scale that one outlier does not flatten", () => {
    const usual = Array.from({ length: 99 }, (_, i) => (i % 2 ? 1 : -1));
    expect(scaleOf(usual)).toBe(1);
    expect(scaleOf([...usual, 1000])).toBeLessThan(400);
    expect(scaleOf([0, 0])).toBe(1);
  });
});

describe("what an edit changed", () => {
  const part = (values: number[]): Tensor => ({
    point: "attn.pattern", shape: [1, 1, 3], of: [1, 1, 3], start: [0, 0, 0], format: "f32", kind: "weights",
    scale: 1, largest: 1, beyond: 4, u8: null, f32: Float32Array.from(values),
  });

  it("is the edited number less the original, signed, on a scale of its own", () => {
    const found = difference(part([0.5, 0.25, NaN]), part([0.25, 0.75, NaN]));
    expect(Array.from(found.f32!)).toEqual([0.25, -0.5, NaN]);
    expect([found.kind, found.scale, found.beyond]).toEqual(["signed", 0.5, 0]);
  });

  it("has a scale also where nothing changed", () => {
    expect(difference(part([1, 0, 0]), part([1, 0, 0])).scale).toBe(1);
  });
});

describe("filling a matrix in", () => {
  const count = (filled: ReturnType<typeof filledAt> | null) => {
    let n = 0;
    for (let r = 0; r < 5; r++) for (let c = 0; c < 7; c++) if (isFilled(filled, r, c)) n++;
    return n;
  };

  it("is empty, one number, one row, then the whole", () => {
    expect(STAGES.map((stage) => count(filledAt(stage, [3, 2], 5, 7)))).toEqual([0, 1, 7, 35]);
    expect(count(null)).toBe(35);
  });

  it.each([[5, 7], [1, 1], [2000, 4096]])("plays through those stages in order and ends with everything, %d × %d", (rows, columns) => {
    const steps = [...playThrough([rows - 1, 0], rows, columns)];
    expect([...new Set(steps.map((step) => step.stage))]).toEqual([...STAGES]);
    expect(steps.length).toBeLessThan(60);
    expect(steps.at(-1)!.filled).toEqual({ cell: [rows - 1, 0], columns, rows });
  });

  it("begins at the pinned cell, else in the last row, and never at one that is hidden", () => {
    expect(beginning([1, 0], 5, false)).toEqual([1, 0]);
    expect(beginning(null, 5, false)).toEqual([4, 0]);
    expect(beginning([1, 3], 5, true)).toEqual([4, 0]);
  });
});

describe("axes", () => {
  it("say what rows and columns count", () => {
    expect(axesOf(["H", "T", "S"])).toEqual(["token", "key"]);
    expect(axesOf(["T", "d_ff"])).toEqual(["token", "neuron"]);
    expect(axesOf(["T", "k", "d"])).toEqual(["token", "width"]);
    expect(axesOf(["T"])).toEqual(["token", ""]);
  });
});

describe("a scar", () => {
  const square = { point: "attn.pattern", x: 100, y: 50, w: 80, h: 80, heads: [{ x: 100, y: 50, w: 80, h: 80 }] } as Box;

  it("strikes only the edge that was cut, in the head that is shown", () => {
    const scar = { heads: [2], edges: [[3, 1]] as [number, number][], keys: [] };
    expect(scarred(square, scar, 4, 2)).toEqual([{ x: 120, y: 110, w: 20, h: 20 }]);
    expect(scarred(square, scar, 4, 0)).toEqual([]);
  });

  it("strikes the column of a token that nobody may look at", () => {
    expect(scarred(square, { heads: [], edges: [], keys: [2] }, 4, 1)).toEqual([{ x: 140, y: 50, w: 20, h: 80 }]);
  });

  it("strikes single heads, or the box where none is named", () => {
    const heads = [0, 1, 2].map((h) => ({ x: 0, y: h * 10, w: 30, h: 8 }));
    const box = { point: "attn.z", x: 0, y: 0, w: 30, h: 28, heads } as Box;
    expect(scarred(box, { heads: [1], edges: [], keys: [] }, 4, 0)).toEqual([heads[1]]);
    expect(scarred(box, { heads: [], edges: [], keys: [] }, 4, 0)).toEqual([box]);
  });
});
