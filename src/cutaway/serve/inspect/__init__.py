"""Inspector API: queries of the web page about a model, answered with JSON data and tensors."""
