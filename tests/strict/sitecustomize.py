"""Makes warnings errors in an interpreter that a test starts, those of foreign modules excepted; see `tests.warned`."""

import warnings

warnings.filterwarnings("error")
warnings.filterwarnings("ignore", module="(?!penstock|__main__)")
warnings.filterwarnings("error", category=ResourceWarning)
