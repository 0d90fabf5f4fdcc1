/* Callgrind's switches, for Python. Outside of valgrind they do nothing. */
#include <valgrind/callgrind.h>

/* Be simulated from here on, and count nothing yet. */
void counting_begin(void) { CALLGRIND_START_INSTRUMENTATION; }

/* Count, or stop counting. */
void counting_toggle(void) { CALLGRIND_TOGGLE_COLLECT; }

/* Write down what was counted, under this name, and be no longer simulated. */
void counting_end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
