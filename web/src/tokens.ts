/** Finding the tokens of a pass in the text that is being typed. */
import type { Token } from "./protocol";

export interface Part {
  text: string;
  token: number | null;
}

const NAMED: Record<string, string> = { "\\n": "\n", "\\t": "\t", "\\r": "\r" };

/** What a piece stands for in the text: its escapes undone. */
export function spelled(piece: string): string {
  return piece.includes("\\") ? piece.replace(/\\[ntr]/g, (found) => NAMED[found]) : piece;
}

/** Whether a tokenizer that drops case, and marks the middle of words, may have made this piece of the text here. */
function loosely(text: string, piece: string, at: number): boolean {
  const bare = piece.replace(/^##/, "");
  return bare !== "" && text.slice(at, at + bare.length).toLowerCase() === bare.toLowerCase();
}

const BYTE = /<0x([0-9A-F]{2})>/;
const LONGEST = 16; // tokens that spell characters together, as scripts that the tokenizer hardly knows need

/**
 * The text that a token spells together with those after it, where its piece ends inside a character: its bytes are
 * written as `<0xE2>`. Null where no character comes of them.
 */
function spelledTogether(tokens: Token[], first: number): { text: string; last: number } | null {
  if (!BYTE.test(tokens[first].piece)) return null;
  const bytes: number[] = [];
  for (let last = first; last < Math.min(tokens.length, first + LONGEST); last++) {
    for (const [index, part] of spelled(tokens[last].piece).split(BYTE).entries()) {
      if (index % 2 === 1) bytes.push(parseInt(part, 16));
      else bytes.push(...new TextEncoder().encode(part));
    }
    try {
      return { text: new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes)), last };
    } catch {
      // A character is still incomplete.
    }
  }
  return null;
}

/**
 * The text cut at its tokens. The text may already be newer than the tokens: where they no longer agree the rest has
 * none. A gap of spaces before a token (word tokenizers drop them) belongs to no token, and bytes that only spell a
 * character together take that character with the first of them.
 */
export function aligned(text: string, tokens: Token[]): Part[] {
  const parts: Part[] = [];
  let at = 0;
  for (let i = 0; i < tokens.length && at < text.length; i++) {
    const piece = spelled(tokens[i].piece);
    const joint = text.startsWith(piece, at) ? null : spelledTogether(tokens, i);
    if (joint && text.startsWith(joint.text, at)) {
      parts.push({ text: joint.text, token: i });
      at += joint.text.length;
      i = joint.last;
      continue;
    }
    if ((piece.startsWith("<0x") && /^<0x[0-9A-F]{2}>$/.test(piece)) || piece.includes("\ufffd")) {
      let end = i;
      while (end + 1 < tokens.length && /^<0x[0-9A-F]{2}>$/.test(tokens[end + 1].piece)) end++;
      const next = end + 1 < tokens.length ? text.indexOf(spelled(tokens[end + 1].piece), at) : text.length;
      const stop = next < 0 ? text.length : next;
      if (stop > at) parts.push({ text: text.slice(at, stop), token: i });
      at = stop;
      i = end;
      continue;
    }
    if (!text.startsWith(piece, at)) {
      const gap = /^\s+/.exec(text.slice(at))?.[0] ?? "";
      if (gap && text.startsWith(piece, at + gap.length)) {
        parts.push({ text: gap, token: null });
        at += gap.length;
      } else if (piece.startsWith(" ") && text.startsWith(piece.slice(1), at)) {
        parts.push({ text: piece.slice(1), token: i }); // a space that the tokenizer put in front
        at += piece.length - 1;
        continue;
      } else if (/^(<.*>|\[[A-Z]+\])$/.test(piece)) {
        continue; // a mark that tokenizing added
      } else if (loosely(text, piece, at + gap.length)) {
        if (gap) parts.push({ text: gap, token: null });
        at += gap.length;
        const length = piece.replace(/^##/, "").length;
        parts.push({ text: text.slice(at, at + length), token: i });
        at += length;
        continue;
      } else {
        break;
      }
    }
    parts.push({ text: piece, token: i });
    at += piece.length;
  }
  if (at < text.length) parts.push({ text: text.slice(at), token: null });
  return parts;
}
