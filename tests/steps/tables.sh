# shellcheck shell=bash
# tables.sh - a step of run.sh: tables of devices and collectives that somebody else has written.

# conform_with NAME BACKEND TABLE [COLL]: the binary that tries a table; prints where it is
conform_with() {
    local name=build/conform/$1/tests
    build "$name" BACKEND="$2" TABLE="$3" COLL="${4:-}" || return 1
}

# A table of somebody else's: its TAP as it comes.
conform() {
    local name
    name=$(basename "$TABLE")
    conform_with "$name" "$BACKEND" "$TABLE" "${COLL:-}" || return 1
    TEST_TIMEOUT_SCALE=3 "build/conform/$name/tests" "-j$JOBS" ${T:-}
}

# as_table NAME TEST...: the binary of tests/conform_tables.h, with one of its tables
as_table() {
    local name=$1
    shift
    CONFORM_TABLE=$name TEST_TIMEOUT_SCALE=3 build/conform/named/tests "-j$JOBS" "$@"
}

# Every bug of tests/conform_tables.h is found by the test that it names.
conform_broken() {
    local bug test
    while read -r bug test; do
        if CONFORM_BUG=$bug build/conform/named/tests "-j$JOBS" "$test" 2>&1 |
            grep -q "^not ok [0-9]* - $test\>"; then
            echo "ok - $test finds that $bug"
        else
            echo "not ok - $test finds that $bug"
        fi
    done < <(sed -n 's/^ *X(\(\w*\), "\(.*\)").*/\1 \2/p' tests/conform_tables.h)
}

step_conform() (
    BACKEND=examples/custom_device.h TABLE=toy_device conform
    export TEST_STRIDE=3
    conform_with named tests/conform_tables.h named_table broken_coll || return 1
    as_table lazy ${T:-}
    as_table shared ${T:-}
    as_table refusing ${T:-device/}
    as_table refusing ${T:-replicate/}
    conform_broken
)
