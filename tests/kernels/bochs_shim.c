// What the package bochscpu-python takes from glibc 2.38, for an older one; loaded before it.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

unsigned long long __isoc23_strtoull(const char* text, char** end, int base) { return strtoull(text, end, base); }

int __isoc23_sscanf(const char* text, const char* format, ...) {
  va_list list;
  va_start(list, format);
  int count = vsscanf(text, format, list);
  va_end(list);
  return count;
}
