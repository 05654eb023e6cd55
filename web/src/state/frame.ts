/** When the browser has drawn. */
const LONGEST = 100; // milliseconds; a page that is not in sight is not drawn at all

/** Until the frame after the one that shows what has been changed so far: what follows belongs to that later frame. */
export function frameAfter(): Promise<void> {
  return new Promise((drawn) => {
    const late = setTimeout(drawn, LONGEST);
    requestAnimationFrame(() =>
      requestAnimationFrame(() => {
        clearTimeout(late);
        drawn();
      }),
    );
  });
}
