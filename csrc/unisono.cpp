// Everything in one translation unit: torch's headers take far longer to read than these files to
// compile.
#include "attach.cpp"
#include "backend.cpp"
#include "batch.cpp"
#include "buffers.cpp"
#include "launch.cpp"
#include "life.cpp"
#include "memory.cpp"
#include "observers.cpp"
#include "sparse.cpp"
#include "work.cpp"
