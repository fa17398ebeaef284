"""Data: from a file, a folder, the hub or a generator to Tasks. Cast: `sources` loads, `files` reads, `rows` makes Tasks. No torch."""
