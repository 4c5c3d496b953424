"""Code that is sent to nodes as a zip. It may import only the standard library and itself."""
