// A picture as a file: drawings with the colors they have on the page, tables as numbers.

export function downloadBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Rows of cells; what a spreadsheet could take for a formula is marked as text. */
export function toCsv(rows: readonly (readonly (string | number)[])[]): string {
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function cell(value: string | number): string {
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const COPIED_STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "paint-order", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "visibility", "display",
]; // prettier-ignore

/** A mixed color as red, green and blue: few programs that open drawings know other ways to write one. */
function toRgb(value: string): string {
  if (!/^(color|oklab|oklch|lab|lch)\(/.test(value)) return value;
  const pen = new OffscreenCanvas(1, 1).getContext("2d");
  if (!pen) return value;
  pen.fillStyle = value;
  pen.fillRect(0, 0, 1, 1);
  const [red = 0, green = 0, blue = 0, alpha = 255] = pen.getImageData(0, 0, 1, 1).data;
  return alpha === 255 ? `rgb(${red}, ${green}, ${blue})` : `rgba(${red}, ${green}, ${blue}, ${(alpha / 255).toFixed(3)})`;
}

/** A drawing that stands alone: what style sheets say is written into it, canvases become images. */
export function toSvg(picture: SVGSVGElement | HTMLCanvasElement): string {
  const { width, height } = picture.getBoundingClientRect();
  const paper = getComputedStyle(picture.closest(".cutaway") ?? picture).backgroundColor;
  if (picture instanceof HTMLCanvasElement) {
    const ground = `<rect width="100%" height="100%" fill="${toRgb(paper)}"/>`;
    const image = `<image width="${width}" height="${height}" href="${picture.toDataURL("image/png")}" image-rendering="${getComputedStyle(picture).imageRendering}"/>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}">${ground}${image}</svg>`;
  }
  const copy = picture.cloneNode(true) as SVGSVGElement;
  const before = [picture, ...picture.querySelectorAll("*")];
  const after = [copy, ...copy.querySelectorAll("*")];
  before.forEach((element, at) => {
    const style = getComputedStyle(element);
    for (const name of COPIED_STYLES) after[at]?.setAttribute(name, toRgb(style.getPropertyValue(name)));
    after[at]?.removeAttribute("style"); // it would win over the attributes, and names variables that only the page has
    after[at]?.removeAttribute("class");
    after[at]?.removeAttribute("tabindex");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: toRgb(paper) })) ground.setAttribute(name, value);
  copy.insertBefore(ground, copy.firstChild);
  return new XMLSerializer().serializeToString(copy);
}

export async function toPng(picture: SVGSVGElement | HTMLCanvasElement): Promise<Blob> {
  const { width, height } = picture.getBoundingClientRect();
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(toSvg(picture))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(width * 2); // sharp in print
  canvas.height = Math.ceil(height * 2);
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("this browser does not draw on canvases");
  pen.scale(2, 2);
  pen.drawImage(image, 0, 0, width, height);
  const written = atob(canvas.toDataURL("image/png").split(",")[1] ?? ""); // toBlob waits until the browser is idle, for seconds
  return new Blob([Uint8Array.from(written, (letter) => letter.charCodeAt(0))], { type: "image/png" });
}
