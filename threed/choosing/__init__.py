"""Search: the fastest layout of a config on so many devices. A fast evaluator prices thousands of layouts
with stages in place of units; the full plan prices the best."""
