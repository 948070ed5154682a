// Colors for canvases, taken from the page's own variables: weights of 0 to 1, and numbers of either sign.
import { theme, type Color } from "./theme.svelte";

class Palette {
  #table: { key: string; colors: Uint8ClampedArray } | undefined;

  /** A variable's color as it is now. */
  color(name: string): Color {
    return theme.color(name);
  }

  cssColor(name: string): string {
    return `rgb(${this.color(name).join(" ")})`;
  }

  /** 256 colors for weights of 0 to 1: the root of a weight, so that small ones are seen too. */
  get weightColormap(): Uint8ClampedArray {
    const key = theme.key;
    if (this.#table?.key === key) return this.#table.colors;
    const [from, to] = [this.color("surface"), this.color("accent")];
    const table = new Uint8ClampedArray(4 * 256);
    for (let at = 0; at < 256; at++) {
      for (let part = 0; part < 3; part++) table[4 * at + part] = (from[part] ?? 0) + ((to[part] ?? 0) - (from[part] ?? 0)) * (at / 255);
      table[4 * at + 3] = 255;
    }
    this.#table = { key, colors: table };
    return table;
  }
}

export const palette = new Palette();

/** Weights as a small picture: what the mask hides is left open, so that the ground shows through. */
export function renderWeights(weights: ArrayLike<number>, visible: ArrayLike<number>, rows: number, columns: number, from = 0): OffscreenCanvas {
  const table = palette.weightColormap;
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
export function drawHatching(pen: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, step = 5): void {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.fillStyle = palette.cssColor("background");
  pen.fillRect(x, y, width, height);
  pen.strokeStyle = palette.cssColor("border");
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
export function sizeCanvas(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
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

/** 256 colors from the page's own: below 0, 0, above 0. */
export function divergingColormap(low: string, high: string): Uint8ClampedArray {
  const ground = theme.color("surface");
  const ends = [theme.color(low), theme.color(high)];
  const table = new Uint8ClampedArray(4 * 256);
  for (let at = 0; at < 256; at++) {
    const value = (at - 128) / 127;
    const end = value < 0 ? ends[0] : ends[1];
    const share = Math.min(1, Math.abs(value)) ** 0.8;
    for (let part = 0; part < 3; part++) table[4 * at + part] = (ground[part] ?? 0) * (1 - share) + (end?.[part] ?? 0) * share;
    table[4 * at + 3] = 255;
  }
  return table;
}
