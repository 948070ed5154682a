// Every screen: axe-core finds nothing in either theme, nothing is cut off at 360 px or lost at 1920, keys go everywhere.
import { AxeBuilder } from "@axe-core/playwright";
import assert from "node:assert/strict";

const SCREENS = { trace: "Trace", edit: "Edit", attention: "Attention", generate: "Generate", gradients: "Gradients", size: "Size", learn: "Learn" };

export async function run(page, url) {
  await page.goto(url);
  await page.getByRole("navigation").waitFor();
  for (const [number, [screen, title]] of Object.entries(SCREENS).entries()) {
    await page.locator("body").click({ position: { x: 2, y: 2 } });
    await page.keyboard.press(String(number + 1));
    assert.match(page.url(), new RegExp(`#/${screen}`));
    assert.equal(await page.getByRole("link", { name: title, exact: true }).getAttribute("aria-current"), "page");
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await settled(page);
      const found = await new AxeBuilder({ page }).analyze();
      const told = found.violations.map((each) => `${screen}, ${scheme}: ${each.id}: ${each.help}: ${each.nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`).join(" | ")}`);
      assert.deepEqual(told, []);
      if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/${screen}-${scheme}.png` });
    }
    for (const width of [360, 1920]) {
      await page.setViewportSize({ width, height: 900 });
      await settled(page);
      const [wide, seen] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
      assert.ok(wide <= seen, `${screen} is ${wide} px wide at ${width}`);
      if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/${screen}-${width}.png`, fullPage: true });
    }
    await page.setViewportSize({ width: 1280, height: 900 });
  }
  // Tab reaches the navigation and the text, and what has the focus is to be seen.
  await page.goto(url);
  await page.getByRole("textbox").waitFor();
  const reached = new Set();
  for (let step = 0; step < 40; step++) {
    await page.keyboard.press("Tab");
    reached.add(await page.evaluate(() => `${document.activeElement?.tagName} ${document.activeElement?.id}`));
  }
  assert.ok(reached.has("TEXTAREA prompt"), [...reached].join(", "));
  await page.keyboard.press("Escape");
}

/** Nothing is being waited for any more. */
async function settled(page) {
  await page.waitForLoadState("networkidle");
  await page.waitForTimeout(200);
}
