// For every program that tests compile with AddressSanitizer: look for no leaks, which takes a second
// process that a test may not expect, and which no program has that becomes another one.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0:abort_on_error=1"; }
