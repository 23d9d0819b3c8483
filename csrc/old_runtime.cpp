// For a module that is compiled with a newer C++ runtime and C library than it must run with: what
// the newer headers refer to and the older libraries lack. `make wheel` defines
// UNISONO_FOR_OLD_RUNTIME; a build for the machine it runs on has no need of it.
#ifdef UNISONO_FOR_OLD_RUNTIME

#include <new>
#include <sstream>
#include <string>

// The headers leave these to the library, which has them since GLIBCXX_3.4.26 and 3.4.29.
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringbuf<char>::basic_stringbuf();
template std::string std::basic_stringbuf<char>::str() const&;
template std::string std::basic_stringbuf<char>::str() &&;

namespace std {
// Since GLIBCXX_3.4.29.
void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

// Since glibc 2.32; 0 says that there may be several threads, which is always safe.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

#endif
