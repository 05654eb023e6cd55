import { describe, expect, it } from "vitest";
import type { Tensor } from "../src/api";
import { differ, ofHead, stepsOf } from "../src/draw/steps";
import type { LayerKind } from "../src/protocol";

const NAMES = ["attn.q", "attn.dots", "attn.scores", "attn.masked", "attn.pattern", "attn.z", "attn.head_out", "attn.out"];

function kindOf(formulas: Record<string, string>, names = NAMES): LayerKind {
  return { points: names.map((name) => ({ name, formula: formulas[name] ?? "" })) } as LayerKind;
}

const CAUSAL = { "attn.scores": "\\frac{q \\cdot k}{\\sqrt{d_{head}}}", "attn.masked": "S + M,\\ \\text{else } -\\infty" };

describe("one head's steps", () => {
  it("go from dot products to what the head adds", () => {
    expect(stepsOf(kindOf(CAUSAL)).map((step) => step.name)).toEqual(["QKᵀ", "÷ √d", "mask", "softmax", "× V", "× W_O"]);
  });

  it("are named by what the layer does", () => {
    const odd = { "attn.scores": "50 \\tanh(0.25 q \\cdot k / 50)", "attn.masked": "S\\quad\\text{(nothing is hidden)}" };
    expect(stepsOf(kindOf(odd)).map((step) => step.name).slice(1, 3)).toEqual(["scale, cap", "no mask"]);
  });

  it("are those that the layer has", () => {
    expect(stepsOf(kindOf(CAUSAL, ["attn.pattern", "mlp.up"])).map((step) => step.point)).toEqual(["attn.pattern"]);
  });
});

describe("a head's own part", () => {
  const tensor = (shape: number[], codes: number[], scale = 1): Tensor => ({
    point: "attn.z", shape, of: shape, start: [0, 0, 0], format: "u8", kind: "signed", scale, largest: 1, beyond: 0,
    u8: Uint8Array.from(codes), f32: null,
  });

  it("is cut out where all heads came, and is all where one came", () => {
    const three = tensor([3, 1, 2], [1, 2, 3, 4, 5, 6]);
    expect(Array.from(ofHead(three, 1).codes)).toEqual([3, 4]);
    expect(Array.from(ofHead(tensor([1, 1, 2], [7, 8]), 2).codes)).toEqual([7, 8]);
  });

  it("differs from another run's where a cell or the scale does, in this head alone", () => {
    const [one, other] = [tensor([2, 1, 2], [1, 2, 3, 4]), tensor([2, 1, 2], [1, 2, 3, 9])];
    expect([differ(one, other, 0), differ(one, other, 1)]).toEqual([false, true]);
    expect(differ(one, tensor([2, 1, 2], [1, 2, 3, 4], 2), 0)).toBe(true);
  });
});
