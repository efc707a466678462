/* The search without a server, and for flags.

   A page opened from the file system may not start a worker: there the same script runs in a hidden frame. And
   a dash before a word means "without it" to the search engine, while readers of this documentation mean a flag. */
(() => {
  const load = (frame, url) =>
    new Promise((resolve, reject) => {
      const script = frame.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
      frame.document.body.append(script);
    });

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const element = document.createElement("iframe");
      element.hidden = true;
      document.body.append(element);
      this.frame = element.contentWindow;
      this.frame.document.open();
      this.frame.document.write("<!doctype html><body></body>");
      this.frame.document.close();
      // What the script calls in a worker: an answer goes to whoever made the worker, not to the frame.
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.importScripts = (...urls) =>
        urls.reduce((loaded, next) => loaded.then(() => load(this.frame, next)), Promise.resolve());
      this.loaded = load(this.frame, url);
      this.loaded.catch((error) => console.error(error.message));
    }

    postMessage(data) {
      this.loaded = this.loaded.then(() =>
        this.frame.dispatchEvent(new this.frame.MessageEvent("message", { data })),
      );
    }

    terminate() {
      this.frame.frameElement.remove();
    }
  }

  const fromFile = location.protocol === "file:";
  const QUERY = 2;

  window.Worker = class extends (fromFile ? IFrameWorker : window.Worker) {
    postMessage(message) {
      const flags = message.type === QUERY ? message.data.replace(/(^|\s)-+(?=\w)/g, "$1") : message.data;
      super.postMessage({ ...message, data: flags });
    }
  };
  // The search script looks for this name to find its language files.
  if (fromFile) window.IFrameWorker = IFrameWorker;
})();
