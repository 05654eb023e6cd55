import { describe, expect, it } from "vitest";
import type { Tensor } from "../src/api";
import { linesOf, loads, paintRoutes, paintSlot, routesOf } from "../src/draw/experts";
import type { Cell, Flow } from "../src/draw/flow";
import { palette } from "../src/draw/scales";
import { expertOff, offers, say, scarsOf } from "../src/edits";
import type { EditCard, LayerKind, Token } from "../src/protocol";

const tensor = (point: string, rows: number, columns: number, values: number[]): Tensor => ({
  point, shape: [1, rows, columns], of: [1, rows, columns], start: [0, 0, 0], format: "f32", kind: "signed",
  scale: 1, largest: 1, beyond: 0, u8: null, f32: Float32Array.from(values),
});

// Three tokens, two of four experts each.
const chosen = tensor("moe.chosen", 3, 2, [2, 0, 2, 3, 0, 2]);
const gates = tensor("moe.gates", 3, 2, [0.75, 0.25, 0.5, 0.5, 0.625, 0.375]);
const routes = routesOf(chosen, gates);
const light = palette(false);

/** A canvas that only notes what is drawn on it. */
function noted() {
  const lines: { colour: string; width: number; alpha: number; to: number[] }[] = [];
  const filled: { colour: string; x: number; y: number; w: number }[] = [];
  const texts: { text: string; colour: string }[] = [];
  const c = {
    strokeStyle: "", fillStyle: "", globalAlpha: 1, lineWidth: 1, font: "", textAlign: "", textBaseline: "",
    beginPath() {}, moveTo() {}, strokeRect() {}, stroke() {},
    bezierCurveTo(...to: number[]) {
      lines.push({ colour: c.strokeStyle, width: c.lineWidth, alpha: c.globalAlpha, to: to.slice(4) });
    },
    fillRect(x: number, y: number, w: number) {
      filled.push({ colour: c.fillStyle, x, y, w });
    },
    fillText(text: string) {
      texts.push({ text, colour: c.fillStyle });
    },
  };
  return { c: c as unknown as CanvasRenderingContext2D, lines, filled, texts };
}

describe("the routes to experts", () => {
  it("are every token's choices with their gates", () => {
    expect(routes).toHaveLength(6);
    expect(routes[3]).toEqual({ token: 1, expert: 3, gate: 0.5, choice: 1 });
    expect(routesOf(undefined, gates)).toEqual([]);
  });

  it("leave absent what is not computed, instead of zero", () => {
    expect(loads(routes, 4, 3)).toEqual([[0.25, null, 0.625], [null, null, null], [0.75, 0.5, 0.375], [null, 0.5, null]]);
  });

  it("are lines only for what is chosen where there are too many to tell apart", () => {
    const many = Array.from({ length: 4000 }, (_, i) => ({ token: i >> 1, expert: i % 8, gate: 0.5, choice: i & 1 }));
    expect(linesOf(many, { token: 7, expert: null }, 2000).every((route) => route.token === 7)).toBe(true);
    expect(linesOf(many, { token: null, expert: null }, 2000).map((route) => route.token)).toEqual([1999, 1999]);
    expect(linesOf(many, { token: 7, expert: 3 }, 2000).every((route) => route.expert === 3)).toBe(true);
    expect(linesOf(routes, { token: 1, expert: null }, 3)).toHaveLength(6);
  });

  const flow = { routes: { x: 100, y: 0, w: 60, h: 80 } } as Flow;
  const rows: Cell = { x: 40, y: 10, w: 60, h: 30 };
  const slots: Cell[] = [0, 1, 2, 3].map((e) => ({ x: 160, y: e * 20, w: 80, h: 16 }));

  it("end at the middle of their expert's slot, the thicker the larger the gate", () => {
    const { c, lines } = noted();
    paintRoutes(c, flow, rows, slots, routes, 3, { token: null, expert: null }, light);
    expect(lines).toHaveLength(6);
    expect(lines[0].to[1]).toBe(slots[2].y + 8);
    expect(lines[0].width).toBeGreaterThan(lines[1].width);
  });

  it("stand out where their token or their expert is chosen", () => {
    const { c, lines } = noted();
    paintRoutes(c, flow, rows, slots, routes, 3, { token: 1, expert: null }, light);
    const mine = lines.filter((line) => line.colour === light.selected);
    expect(mine.map((line) => line.to[1])).toEqual([slots[2].y + 8, slots[3].y + 8]);
    expect(mine.every((line) => line.alpha > 0.9)).toBe(true);
    expect(lines.filter((line) => line.colour !== light.selected).every((line) => line.alpha < 0.2)).toBe(true);
  });

  it("show in a slot only the tokens that come there", () => {
    const { c, filled, texts } = noted();
    paintSlot(c, slots[3], 3, [null, 0.5, null], 0.75, { token: null, expert: null }, false, "sans", light);
    expect(filled).toHaveLength(2); // the ground, and one token
    expect(texts).toEqual([{ text: "3", colour: light.ink }]);
  });
});

describe("switching an expert off", () => {
  const kind = { sizes: { H: 4, E: 8 }, points: [{ name: "moe.scores", symbols: ["T", "E"] }] } as unknown as LayerKind;
  const tokens: Token[] = [{ id: 1, piece: "a" }];

  it("is offered for the one that is looked at, and once only", () => {
    const labels = (expert: number | null, cell: [number, number] | null) =>
      offers(kind, 1, 0, "layers.1.moe.scores", cell, null, tokens, expert).map((offer) => offer.label);
    expect(labels(3, null)).toContain("expert 3 off");
    expect(labels(3, [0, 3]).filter((label) => label.startsWith("expert"))).toEqual(["expert 3 off"]);
    expect(labels(null, null).some((label) => label.startsWith("expert"))).toBe(false);
  });

  it("is said in words and scars that expert's slot", () => {
    const { edit } = expertOff(1, 3);
    expect(say(edit, tokens)).toBe("layer 1, expert 3 off");
    const card = { edit, words: "", points: ["layers.1.moe.scores"], elements: 1, changed: 1 } as EditCard;
    expect(scarsOf([card], 1).get("moe.expert_out")).toEqual([{ heads: [3], edges: [], keys: [] }]);
    expect(scarsOf([card], 0).size).toBe(0);
  });
});
