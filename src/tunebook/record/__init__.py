"""What a run leaves behind: its folder, manifest, metrics and report."""
