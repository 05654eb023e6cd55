/** Knowing what of a long list is in sight, so that the rest need not stand in the page. */

/** Tells `seen` whenever the element comes near what `scroller` (a selector of an ancestor) shows, and when it goes. */
export function inSight(node: HTMLElement, { scroller, seen }: { scroller: string; seen: (near: boolean) => void }) {
  const observer = new IntersectionObserver((entries) => seen(entries[entries.length - 1].isIntersecting), {
    root: node.closest(scroller),
    rootMargin: "120px 0px",
  });
  observer.observe(node);
  return { destroy: () => observer.disconnect() };
}

/** A list in pieces of `size`, each with the place of its first element. */
export function chunks<T>(list: T[], size: number): { first: number; items: T[] }[] {
  return Array.from({ length: Math.ceil(list.length / size) }, (_, i) => ({
    first: i * size,
    items: list.slice(i * size, (i + 1) * size),
  }));
}

export const CHUNK = 64; // tokens that come and go together
export const LONG = 256; // tokens from which on only those in sight stand in the page
