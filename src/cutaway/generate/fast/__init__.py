"""Fast decoding: the same equations, computed by what each machine does best."""
