// Colours for canvases, taken from the page's own variables.
import { theme, type Colour } from "../../lib/theme.svelte";

class Inks {
  #table: { key: string; colours: Uint8ClampedArray } | undefined;

  /** A variable's colour as it is now. */
  of(name: string): Colour {
    return theme.colour(name);
  }

  css(name: string): string {
    return `rgb(${this.of(name).join(" ")})`;
  }

  /** 256 colours for weights of 0 to 1: the root of a weight, so that small ones are seen too. */
  get weights(): Uint8ClampedArray {
    const key = theme.key;
    if (this.#table?.key === key) return this.#table.colours;
    const [from, to] = [this.of("sheet"), this.of("lane")];
    const table = new Uint8ClampedArray(4 * 256);
    for (let at = 0; at < 256; at++) {
      for (let part = 0; part < 3; part++) table[4 * at + part] = (from[part] ?? 0) + ((to[part] ?? 0) - (from[part] ?? 0)) * (at / 255);
      table[4 * at + 3] = 255;
    }
    this.#table = { key, colours: table };
    return table;
  }
}

export const inks = new Inks();

/** Weights as a small picture: what the mask hides is left open, so that the ground shows through. */
export function painted(weights: ArrayLike<number>, visible: ArrayLike<number>, rows: number, columns: number, from = 0): OffscreenCanvas {
  const table = inks.weights;
  const picture = new ImageData(columns, rows);
  const cells = new Uint32Array(picture.data.buffer);
  const shades = new Uint32Array(table.buffer);
  for (let at = 0; at < rows * columns; at++) {
    if (visible[at]) cells[at] = shades[Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, weights[from + at] ?? 0))))] ?? 0;
  }
  const aside = new OffscreenCanvas(columns, rows);
  aside.getContext("2d")?.putImageData(picture, 0, 0);
  return aside;
}

/** Slanting lines: what the mask hides. */
export function hatched(pen: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, step = 5): void {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.fillStyle = inks.css("paper");
  pen.fillRect(x, y, width, height);
  pen.strokeStyle = inks.css("line");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let at = -height; at < width; at += step) {
    pen.moveTo(x + at, y + height);
    pen.lineTo(x + at + height, y);
  }
  pen.stroke();
  pen.restore();
}

/** A canvas of this size in CSS pixels, sharp on every screen and in print. */
export function prepared(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const dense = 2;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen?.scale(dense, dense);
  if (pen) pen.imageSmoothingEnabled = false;
  return pen;
}
