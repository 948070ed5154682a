// Accessibility of every screen: no axe-core violations at 390, 1440 and 1920 px in both themes, no horizontal overflow from 360 px on, keyboard navigation.
import { AxeBuilder } from "@axe-core/playwright";
import assert from "node:assert/strict";

const SCREENS = { model: "Model", trace: "Trace", edit: "Edit", compare: "Compare", attention: "Attention", generate: "Generate", training: "Training", size: "Size", check: "Check", learn: "Learn" };
const WIDTHS = [390, 1440, 1920];

export async function run(page, url) {
  await page.goto(url);
  await page.getByRole("navigation", { name: "Screens" }).waitFor();
  for (const [number, [screen, title]] of Object.entries(SCREENS).entries()) {
    await page.locator("body").click({ position: { x: 2, y: 2 } });
    await page.keyboard.press(String((number + 1) % 10));
    assert.match(page.url(), new RegExp(`#/${screen}`));
    assert.equal(await page.getByRole("link", { name: title, exact: true }).getAttribute("aria-current"), "page");
    await checkAllSizes(page, screen);
  }
  // The steps inside attention and FFN.
  for (const zoom of ["attn", "ffn"]) {
    await page.goto(`${url}#/model?zoom=${zoom}`);
    await page.getByRole("group", { name: /^Steps of/ }).waitFor();
    await checkAllSizes(page, `model-${zoom}`);
  }
  for (const tab of ["exercises", "quiz", "interview"]) {
    await page.goto(`${url}#/learn?tab=${tab}`);
    await page.locator("main h2").first().waitFor();
    await checkAllSizes(page, `learn-${tab}`);
  }
  // Tab reaches the prompt.
  await page.goto(url);
  await page.getByRole("textbox").waitFor();
  const focused = new Set();
  for (let step = 0; step < 40; step++) {
    await page.keyboard.press("Tab");
    focused.add(await page.evaluate(() => `${document.activeElement?.tagName} ${document.activeElement?.id}`));
  }
  assert.ok(focused.has("TEXTAREA prompt"), [...focused].join(", "));
  await page.keyboard.press("Escape");
}

/** Run axe-core at every width in both themes, and check that the page is not wider than the window. */
async function checkAllSizes(page, name) {
  for (const width of [360, ...WIDTHS]) {
    await page.setViewportSize({ width, height: 900 });
    await waitUntilIdle(page);
    const [scrollWidth, clientWidth] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
    assert.ok(scrollWidth <= clientWidth, `${name} is ${scrollWidth} px wide at ${width}`);
    if (!WIDTHS.includes(width)) continue;
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await waitUntilIdle(page);
      const { violations } = await new AxeBuilder({ page }).analyze();
      const messages = violations.map((violation) => `${violation.id}: ${violation.help}: ${violation.nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`).join(" | ")}`);
      assert.deepEqual(messages, [], `${name}, ${width} px, ${scheme}`);
      if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}-${width}-${scheme}.png`, fullPage: true });
    }
  }
  await page.setViewportSize({ width: 1280, height: 900 });
}

/** Wait until all requests are finished. */
async function waitUntilIdle(page) {
  await page.waitForLoadState("networkidle");
  await page.waitForTimeout(200);
}
