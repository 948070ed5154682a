// Download figures as SVG or PNG files, and their data as CSV.

export function downloadBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Format rows as CSV; cells that a spreadsheet would read as a formula are prefixed with an apostrophe. */
export function toCsv(rows: readonly (readonly (string | number)[])[]): string {
  return rows.map((row) => row.map(formatCell).join(",")).join("\r\n") + "\r\n";
}

function formatCell(value: string | number): string {
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const COPIED_STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "paint-order", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "visibility", "display",
]; // prettier-ignore

/** Convert CSS color functions to rgb(), which every SVG program reads. */
function toRgb(value: string): string {
  if (!/^(color|oklab|oklch|lab|lch)\(/.test(value)) return value;
  const ctx = new OffscreenCanvas(1, 1).getContext("2d");
  if (!ctx) return value;
  ctx.fillStyle = value;
  ctx.fillRect(0, 0, 1, 1);
  const [red = 0, green = 0, blue = 0, alpha = 255] = ctx.getImageData(0, 0, 1, 1).data;
  return alpha === 255 ? `rgb(${red}, ${green}, ${blue})` : `rgba(${red}, ${green}, ${blue}, ${(alpha / 255).toFixed(3)})`;
}

/** Serialize a figure as a standalone SVG: computed styles become attributes, a canvas becomes an image. */
export function toSvg(figure: SVGSVGElement | HTMLCanvasElement): string {
  const { width, height } = figure.getBoundingClientRect();
  const background = getComputedStyle(figure.closest(".cutaway") ?? figure).backgroundColor;
  if (figure instanceof HTMLCanvasElement) {
    const backgroundRect = `<rect width="100%" height="100%" fill="${toRgb(background)}"/>`;
    const image = `<image width="${width}" height="${height}" href="${figure.toDataURL("image/png")}" image-rendering="${getComputedStyle(figure).imageRendering}"/>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}">${backgroundRect}${image}</svg>`;
  }
  const copy = figure.cloneNode(true) as SVGSVGElement;
  const originals = [figure, ...figure.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const name of COPIED_STYLES) copies[index]?.setAttribute(name, toRgb(style.getPropertyValue(name)));
    copies[index]?.removeAttribute("style"); // inline styles override the attributes and refer to CSS variables of the page
    copies[index]?.removeAttribute("class");
    copies[index]?.removeAttribute("tabindex");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const backgroundRect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: toRgb(background) })) backgroundRect.setAttribute(name, value);
  copy.insertBefore(backgroundRect, copy.firstChild);
  return new XMLSerializer().serializeToString(copy);
}

export async function toPng(figure: SVGSVGElement | HTMLCanvasElement): Promise<Blob> {
  const { width, height } = figure.getBoundingClientRect();
  const image = new Image();
  const loaded = new Promise<void>((resolve, reject) => {
    image.onload = () => resolve(); // decode() waits for a frame of the compositor, which a busy browser delays
    image.onerror = () => reject(new Error("this browser cannot draw the figure as an image; save it as SVG"));
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(toSvg(figure))}`;
  await loaded;
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(width * 2); // twice the resolution, for print
  canvas.height = Math.ceil(height * 2);
  const ctx = canvas.getContext("2d");
  if (!ctx) throw new Error("this browser has no 2D canvas context, so the figure cannot be saved as PNG; save it as SVG");
  ctx.scale(2, 2);
  ctx.drawImage(image, 0, 0, width, height);
  const binary = atob(canvas.toDataURL("image/png").split(",")[1] ?? ""); // toBlob waits for an idle browser, which can take seconds
  return new Blob([Uint8Array.from(binary, (char) => char.charCodeAt(0))], { type: "image/png" });
}
