/** Going on with the text: a token drawn from the page's own distribution, appended, and the model run again. */
import { api } from "../api";
import type { NextTokenCard } from "../protocol";
import { session } from "./session.svelte";

/** Append the token that was drawn (or a given one) and run again. True where the model may go on. */
export async function step(id: number | null = null): Promise<boolean> {
  const { shown, drawn, card } = session;
  if (!shown || !drawn || !card) return false;
  const tokens = shown.manifest.tokens;
  if (tokens.length >= card.longest) {
    session.problem = { sentence: `The text has reached the ${card.longest} tokens that this page takes.`, kind: "too long" };
    return false;
  }
  const chosen = id ?? drawn.id;
  let token: NextTokenCard;
  try {
    token = shown.manifest.next.find((one) => one.id === chosen) ?? (await api.token(shown.manifest.run, chosen));
  } catch (error) {
    session.fail(error);
    return false;
  }
  session.ids = [...tokens.map((one) => one.id), chosen];
  session.grown = [...session.grown, { token, uniform: drawn.uniform }];
  // Where one token alone is left no number is drawn, as in `generate`.
  if (id === null && (session.distribution?.kept ?? 1) > 1) session.used += 1;
  await session.run();
  const went = session.shown?.manifest.tokens.length === tokens.length + 1;
  return session.problem === null && went && !card.stop_ids.includes(chosen);
}

/** Step until a stop token, an error, or the person stops it. */
export async function play(): Promise<void> {
  if (session.running) {
    session.running = false;
    return;
  }
  session.remember("run");
  session.running = true;
  while (session.running && (await step())) await new Promise((resolve) => setTimeout(resolve, 30));
  session.running = false;
}

/** Back to the text as it was typed. */
export async function rewind(): Promise<void> {
  session.running = false;
  session.ids = null;
  session.grown = [];
  session.used = 0;
  await session.run();
}
