import { describe, expect, it } from "vitest";
import type { Tensor } from "../src/api";
import { difference } from "../src/draw/numbers";
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
