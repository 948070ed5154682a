// Accessibility of every screen: no axe-core violations in both themes, no horizontal overflow at 360 and 1920 px, keyboard navigation.
import { AxeBuilder } from "@axe-core/playwright";
import assert from "node:assert/strict";

const SCREENS = { model: "Model", trace: "Trace", edit: "Edit", compare: "Compare", attention: "Attention", generate: "Generate", training: "Training", size: "Size", check: "Check", learn: "Learn" };

export async function run(page, url) {
  await page.goto(url);
  await page.getByRole("navigation", { name: "Screens" }).waitFor();
  for (const [number, [screen, title]] of Object.entries(SCREENS).entries()) {
    await page.locator("body").click({ position: { x: 2, y: 2 } });
    await page.keyboard.press(String(number + 1));
    assert.match(page.url(), new RegExp(`#/${screen}`));
    assert.equal(await page.getByRole("link", { name: title, exact: true }).getAttribute("aria-current"), "page");
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await waitUntilIdle(page);
      const results = await new AxeBuilder({ page }).analyze();
      const violations = results.violations.map((violation) => `${screen}, ${scheme}: ${violation.id}: ${violation.help}: ${violation.nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`).join(" | ")}`);
      assert.deepEqual(violations, []);
      if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${screen}-${scheme}.png` });
    }
    for (const width of [360, 1920]) {
      await page.setViewportSize({ width, height: 900 });
      await waitUntilIdle(page);
      const [scrollWidth, clientWidth] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
      assert.ok(scrollWidth <= clientWidth, `${screen} is ${scrollWidth} px wide at ${width}`);
      if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${screen}-${width}.png`, fullPage: true });
    }
    await page.setViewportSize({ width: 1280, height: 900 });
  }
  // The steps inside attention and FFN.
  for (const zoom of ["attn", "ffn"]) {
    await page.goto(`${url}#/model?zoom=${zoom}`);
    await page.getByRole("group", { name: /^Steps of/ }).waitFor();
    await waitUntilIdle(page);
    const results = await new AxeBuilder({ page }).analyze();
    assert.deepEqual(results.violations.map((violation) => `${zoom}: ${violation.id}: ${violation.nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`), []);
    await page.setViewportSize({ width: 360, height: 900 });
    await waitUntilIdle(page);
    const [scrollWidth, clientWidth] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
    assert.ok(scrollWidth <= clientWidth, `${zoom} is ${scrollWidth} px wide at 360`);
    await page.setViewportSize({ width: 1280, height: 900 });
  }
  // The tabs of Learn.
  for (const tab of ["exercises", "quiz", "interview"]) {
    await page.goto(`${url}#/learn?tab=${tab}`);
    await page.locator("main h2").first().waitFor();
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      await waitUntilIdle(page);
      const results = await new AxeBuilder({ page }).analyze();
      assert.deepEqual(results.violations.map((violation) => `${tab}, ${scheme}: ${violation.id}: ${violation.nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`), []);
    }
    for (const width of [360, 1920]) {
      await page.setViewportSize({ width, height: 900 });
      await waitUntilIdle(page);
      const [scrollWidth, clientWidth] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
      assert.ok(scrollWidth <= clientWidth, `${tab} is ${scrollWidth} px wide at ${width}`);
    }
    await page.setViewportSize({ width: 1280, height: 900 });
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

/** Wait until all requests are finished. */
async function waitUntilIdle(page) {
  await page.waitForLoadState("networkidle");
  await page.waitForTimeout(200);
}
