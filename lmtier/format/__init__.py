"""The formats of names and bytes: keys, layouts, objects, codecs. No I/O."""
