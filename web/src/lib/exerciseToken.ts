// Token that allows the page to write and run the code of exercises. `cutaway open` passes it in the fragment of the address.
const KEY = "cutaway.exercise-token";

let token: string | undefined;

/** Move the token from the address to the storage of this origin, so that links and the history do not contain it. */
export function takeExerciseToken(): void {
  const [path = "", query = ""] = location.hash.slice(1).split("?", 2);
  const params = new URLSearchParams(query);
  const received = params.get("exercise_token");
  if (received === null) return;
  token = received;
  params.delete("exercise_token");
  history.replaceState(null, "", `#${path}?${params.toString()}`);
  try {
    localStorage.setItem(KEY, received);
  } catch {
    return; // without storage, the token lasts until the page is closed
  }
}

/** The token; empty if the page was opened without one. */
export function exerciseToken(): string {
  if (token === undefined) {
    try {
      token = localStorage.getItem(KEY) ?? "";
    } catch {
      token = "";
    }
  }
  return token;
}
