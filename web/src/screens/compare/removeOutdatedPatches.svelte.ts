// Removal of the patches in the URL when a text changes: their positions refer to the tokens of the texts for which they were chosen.
import { urlState } from "../../lib/urlState.svelte";

/** Remove the patches when one of the texts is edited. A link, or the back button, sets texts and patches together: its patches stay. */
export function removeOutdatedPatches(getTexts: () => string[]): void {
  let previous: { texts: string; patches: string | undefined } | undefined;

  $effect(() => {
    const forget = (): void => void (previous = undefined);
    // In the capture phase, before the URL is parsed.
    addEventListener("popstate", forget, true);
    return () => removeEventListener("popstate", forget, true);
  });

  $effect(() => {
    const current = { texts: JSON.stringify(getTexts()), patches: urlState.get("patches") };
    const isOutdated = previous !== undefined && current.patches !== undefined && previous.patches === current.patches && previous.texts !== current.texts;
    previous = current;
    if (isOutdated) urlState.update({ patches: null });
  });
}
