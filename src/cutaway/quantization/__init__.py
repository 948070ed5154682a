"""Weight matrices that stay packed in memory: block formats, and the tensor subclass that computes with them."""
