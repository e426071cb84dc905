"""Images and their classes: where they come from (`sources`, `formats`), as pixels (`decode`), as samples (`load`)."""
