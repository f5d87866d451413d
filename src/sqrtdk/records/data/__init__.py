"""Files that come with sqrtdk: the text that audits read, and dated records of what takes long to measure."""
