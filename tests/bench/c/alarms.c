#include "alarms.h"

#include "bytes.h"

static void put(struct alarms *alarms, size_t place, struct alarm *alarm)
{
    alarms->heap[place] = alarm;
    alarm->place = place;
}

static void rise(struct alarms *alarms, struct alarm *alarm)
{
    size_t place = alarm->place;
    while (place > 1 && alarms->heap[place / 2]->due > alarm->due) {
        put(alarms, place, alarms->heap[place / 2]);
        place /= 2;
    }
    put(alarms, place, alarm);
}

static void sink(struct alarms *alarms, struct alarm *alarm)
{
    size_t place = alarm->place;
    for (;;) {
        size_t child = place * 2;
        if (child > alarms->count)
            break;
        if (child < alarms->count && alarms->heap[child + 1]->due < alarms->heap[child]->due)
            child++;
        if (alarms->heap[child]->due >= alarm->due)
            break;
        put(alarms, place, alarms->heap[child]);
        place = child;
    }
    put(alarms, place, alarm);
}

void alarms_add(struct alarms *alarms, struct alarm *alarm)
{
    if (alarms->count + 2 > alarms->capacity) {
        alarms->capacity = alarms->capacity ? alarms->capacity * 2 : 1024;
        alarms->heap = reallocate(alarms->heap, alarms->capacity * sizeof *alarms->heap);
    }
    put(alarms, ++alarms->count, alarm);
    rise(alarms, alarm);
}

void alarms_remove(struct alarms *alarms, struct alarm *alarm)
{
    if (alarm->place == 0)
        return;
    struct alarm *last = alarms->heap[alarms->count--];
    if (last != alarm) {
        put(alarms, alarm->place, last);
        rise(alarms, last);
        sink(alarms, last);
    }
    alarm->place = 0;
}

struct alarm *alarms_first(const struct alarms *alarms)
{
    return alarms->count ? alarms->heap[1] : NULL;
}
