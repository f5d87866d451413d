"""Records of runs and audits, and the files that come with sqrtdk."""
