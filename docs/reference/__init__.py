"""Reference pages that are generated from the code. `specc explain` reads them."""
