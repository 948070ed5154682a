"""HTTP: the API that others call, the inspector's, and the page."""
