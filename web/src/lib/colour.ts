// Colours for numbers, drawn on canvases: pale at 0, one hue for each sign, in both themes.

/** 256 colours from the page's own variables: below 0, 0, above 0. */
export function ramp(element: Element, low: string, high: string): Uint8ClampedArray {
  const ground = parsed(element, "--sheet");
  const ends = [parsed(element, low), parsed(element, high)];
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

function parsed(element: Element, name: string): number[] {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.appendChild(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0];
  probe.remove();
  return found;
}
