// Colormaps and drawing helpers for canvases, with the colors of the page's CSS variables.
import { theme, type Color } from "./theme.svelte";

class Palette {
  #table: { key: string; colors: Uint8ClampedArray } | undefined;

  /** Color of a CSS variable in the current theme. */
  color(name: string): Color {
    return theme.color(name);
  }

  cssColor(name: string): string {
    return `rgb(${this.color(name).join(" ")})`;
  }

  /** Colormap of 256 colors from 0 to 1. Callers index it by the square root of a weight, so that small weights are visible. */
  get weightColormap(): Uint8ClampedArray {
    const key = theme.key;
    if (this.#table?.key === key) return this.#table.colors;
    const [from, to] = [this.color("surface"), this.color("accent")];
    const table = new Uint8ClampedArray(4 * 256);
    for (let index = 0; index < 256; index++) {
      for (let channel = 0; channel < 3; channel++) table[4 * index + channel] = (from[channel] ?? 0) + ((to[channel] ?? 0) - (from[channel] ?? 0)) * (index / 255);
      table[4 * index + 3] = 255;
    }
    this.#table = { key, colors: table };
    return table;
  }
}

export const palette = new Palette();

/** Render weights, one pixel per entry; masked entries are transparent. */
export function renderWeights(weights: ArrayLike<number>, visible: ArrayLike<number>, rows: number, columns: number, from = 0): OffscreenCanvas {
  const table = palette.weightColormap;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const colors = new Uint32Array(table.buffer);
  for (let index = 0; index < rows * columns; index++) {
    if (visible[index]) pixels[index] = colors[Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, weights[from + index] ?? 0))))] ?? 0;
  }
  const offscreen = new OffscreenCanvas(columns, rows);
  offscreen.getContext("2d")?.putImageData(image, 0, 0);
  return offscreen;
}

/** Draw the hatching of masked entries. */
export function drawHatching(ctx: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, step = 5, color = "border"): void {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, width, height);
  ctx.clip();
  ctx.fillStyle = palette.cssColor("background");
  ctx.fillRect(x, y, width, height);
  ctx.strokeStyle = palette.cssColor(color);
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let offset = -height; offset < width; offset += step) {
    ctx.moveTo(x + offset, y + height);
    ctx.lineTo(x + offset + height, y);
  }
  ctx.stroke();
  ctx.restore();
}

/** Set a canvas to this size in CSS pixels, at twice the resolution for high-density screens and print. */
export function sizeCanvas(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const pixelRatio = 2;
  canvas.width = Math.round(width * pixelRatio);
  canvas.height = Math.round(height * pixelRatio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx?.scale(pixelRatio, pixelRatio);
  if (ctx) ctx.imageSmoothingEnabled = false;
  return ctx;
}

/** 256 colors of a diverging colormap; entry 128 is 0. */
export function divergingColormap(low: string, high: string): Uint8ClampedArray {
  const zeroColor = theme.color("surface");
  const endColors = [theme.color(low), theme.color(high)];
  const table = new Uint8ClampedArray(4 * 256);
  for (let index = 0; index < 256; index++) {
    const value = (index - 128) / 127;
    const endColor = value < 0 ? endColors[0] : endColors[1];
    const fraction = Math.min(1, Math.abs(value)) ** 0.8;
    for (let channel = 0; channel < 3; channel++) table[4 * index + channel] = (zeroColor[channel] ?? 0) * (1 - fraction) + (endColor?.[channel] ?? 0) * fraction;
    table[4 * index + 3] = 255;
  }
  return table;
}
