#include "samples.h"

#include "bytes.h"

#include <stdio.h>
#include <stdlib.h>

void samples_add(struct samples *samples, int64_t ns)
{
    if (samples->count == samples->capacity) {
        samples->capacity = samples->capacity ? samples->capacity * 2 : 65536;
        samples->tenths_us = reallocate(samples->tenths_us, samples->capacity * sizeof *samples->tenths_us);
    }
    int64_t tenths = ns < 0 ? 0 : ns / 100;
    samples->tenths_us[samples->count++] = tenths > UINT32_MAX ? UINT32_MAX : (uint32_t)tenths;
}

static int compare(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

static double quantile(const struct samples *samples, double q)
{
    return samples->count ? samples->tenths_us[(size_t)((double)(samples->count - 1) * q)] / 10.0 : 0;
}

void samples_print(struct samples *samples, const char *name)
{
    double sum = 0;
    if (samples->count)
        qsort(samples->tenths_us, samples->count, sizeof *samples->tenths_us, compare);
    for (size_t i = 0; i < samples->count; i++)
        sum += samples->tenths_us[i] / 10.0;
    printf("\"%s\":{\"n\":%zu,\"mean\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f}", name,
           samples->count, samples->count ? sum / (double)samples->count : 0, quantile(samples, 0.5), quantile(samples, 0.9),
           quantile(samples, 0.99), quantile(samples, 0.999), quantile(samples, 1));
}
