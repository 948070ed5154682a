// Removal of the patches in the URL when a text changes: their positions refer to the tokens of the texts for which they were chosen.
import { urlState } from "../../lib/urlState.svelte";

/** Remove the patches when one of the texts is edited. A link with other texts and other patches keeps its patches. */
export function removeOutdatedPatches(getTexts: () => string[]): void {
  let previous: { texts: string; patches: string | undefined } | undefined;

  $effect(() => {
    const current = { texts: JSON.stringify(getTexts()), patches: urlState.get("patches") };
    const isOutdated = previous !== undefined && current.patches !== undefined && previous.patches === current.patches && previous.texts !== current.texts;
    previous = current;
    if (isOutdated) urlState.update({ patches: null });
  });
}
