/** A canvas as a PNG file, on the ground that it is seen on. */
export function savePicture(canvas: HTMLCanvasElement | null | undefined, name: string, ground: string): void {
  if (!canvas) return;
  const whole = document.createElement("canvas");
  whole.width = canvas.width;
  whole.height = canvas.height;
  const context = whole.getContext("2d")!;
  context.fillStyle = ground;
  context.fillRect(0, 0, whole.width, whole.height);
  context.drawImage(canvas, 0, 0);
  whole.toBlob((blob) => {
    if (!blob) return;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${name}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}
