"""Runs the scripts that a page shows."""


def run_script(text):
    """Run a script that a page shows and return its names."""
    names = {}
    exec(compile(text.replace("print(", "str("), "script", "exec"), names)
    return names
