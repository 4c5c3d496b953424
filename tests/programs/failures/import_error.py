# expect-rank: all
# expect-exit: 1
# expect-cause: ModuleNotFoundError: No module named 'apex_of_nowhere'
# expect-frame: import_error.py:9 in <module>
# expect-repeats: import error
# expect-hint: apex_of_nowhere
"""A package is missing in the workers' interpreter."""

import apex_of_nowhere

apex_of_nowhere.run()
