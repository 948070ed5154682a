"""Inspector API: answers the web page's queries about a model with JSON data and tensors."""
